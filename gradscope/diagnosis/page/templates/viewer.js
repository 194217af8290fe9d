// The token viewer. Text from models only ever goes through textContent.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("viewer-data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paper = matchMedia("print");
  const element = (id) => document.getElementById(id);
  const make = (tag, className, text) => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };

  // Colours from the lower end of a scale to its upper end; distinct to colour-blind eyes, and monotone in lightness.
  const INKS = {
    light: { sequential: ["#fcfcfa", "#dcebf7", "#a3cce6", "#559ccf", "#1c69af", "#08306b"],
             diverging: ["#9a3d00", "#e08a3c", "#fbdcb8", "#fcfcfa", "#c9dff0", "#5a9bcd", "#08488f"] },
    dark: { sequential: ["#15181c", "#17344d", "#1d5c8a", "#3f8fc4", "#86c2e6", "#e3f3fc"],
            diverging: ["#ffb26b", "#b9651c", "#5a3413", "#15181c", "#173f63", "#2f7fbd", "#9fd2f5"] },
  };
  const toRgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const inks = (scale) => INKS[dark.matches && !state.printing ? "dark" : "light"][["diverging", "ranked"].includes(scale) ? "diverging" : "sequential"];

  function mix(stops, fraction) {
    const at = Math.min(Math.max(fraction, 0), 1) * (stops.length - 1);
    const below = Math.min(Math.floor(at), stops.length - 2);
    const [a, b] = [toRgb(stops[below]), toRgb(stops[below + 1])];
    return a.map((value, channel) => Math.round(value + (at - below) * (b[channel] - value)));
  }

  // Black or white, whichever is easier to read on the colour: one of them has a contrast of at least 4.58.
  function textOn(rgb) {
    const [r, g, b] = rgb.map((value) => (value / 255 <= 0.04045 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
  }

  function fractionOf(quantity, value) {
    const { low, high, scale, reverse, ranks } = quantity;
    if (scale === "ranked") return 0.5 + (Math.sign(value) * Math.max(0, rankOf(ranks, Math.abs(value)) - 0.5));
    const place = scale === "log" ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : (value - low) / (high - low);
    return reverse ? 1 - place : place;
  }

  // The share of the tokens whose size is at most this one's; half of them stay unshaded.
  function rankOf(ranks, size) {
    let [below, above] = [0, ranks.length - 1];
    while (above - below > 1) {
      const middle = (below + above) >> 1;
      if (ranks[middle] <= size) below = middle;
      else above = middle;
    }
    const width = ranks[above] - ranks[below];
    const inside = width > 0 ? Math.min(1, Math.max(0, (size - ranks[below]) / width)) : size >= ranks[above] ? 1 : 0;
    return (below + inside) / (ranks.length - 1);
  }

  function show(value, digits = 7) {
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    const size = Math.abs(value);
    const rounded = Number(value.toPrecision(digits));
    if (size === 0 || (size >= 1e-5 && size < 1e7)) return String(rounded).replaceAll("-", "−");
    const [mantissa, power] = rounded.toExponential().replace("+", "").split("e");
    const raised = Array.from(power, (sign) => (sign === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[sign])).join("");
    return `${mantissa}·10${raised}`.replaceAll("-", "−");
  }

  const withUnit = (value, unit, digits) => (unit ? `${show(value, digits)} ${unit}` : show(value, digits));

  // Characters that would show nothing, or rearrange what stands around them, by a visible name.
  const NAMES = {
    0x61c: "ALM", 0x200b: "ZWSP", 0x200e: "LRM", 0x200f: "RLM", 0x2028: "LS", 0x2029: "PS", 0x2060: "WJ", 0xfeff: "BOM",
    0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF", 0x202d: "LRO", 0x202e: "RLO",
    0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI",
  };
  const visible = (text) => Array.from(text, (character) => {
    const code = character.codePointAt(0);
    if (code < 32 && code !== 9 && code !== 10 && code !== 13) return String.fromCharCode(0x2400 + code);
    return code in NAMES ? `⟨${NAMES[code]}⟩` : code >= 0x7f && code < 0xa0 ? `⟨${code.toString(16).toUpperCase()}⟩` : character;
  }).join("");
  const MARKS = { "\n": "↵", "\r": "␍", "\t": "⇥" };
  const spelled = (text) => {
    if (text === "") return "(empty)";
    const marked = visible(text).replace(/[\n\r\t]/g, (character) => MARKS[character]).replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
    return marked.length > 60 ? `${marked.slice(0, 60)}…` : marked;
  };

  function decode(text) {
    const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    return Float32Array.from({ length: bytes.length / 4 }, (_, index) => view.getFloat32(4 * index, true));
  }

  const responses = data.responses.map((entry, place) => {
    const starts = new Map(entry.jumps);
    let position = -1;
    return {
      ...entry, place, starts, values: entry.values.map(decode), article: null,
      positions: entry.tokens.map((_, index) => (position = starts.get(index) ?? position + 1)),
    };
  });

  const opened = responses.find(({ response }) => response === data.first) ?? responses[0];
  const state = { quantity: data.shade, sorted: responses, current: opened, printing: paper.matches };

  // ---- one response ----

  function summarize(response, { by, quantity }) {
    if (by === "place") return response.place;
    if (by === "reward") return response.reward ?? NaN;
    if (by === "length") return response.tokens.length;
    const known = response.values[quantity].filter((value) => !Number.isNaN(value));
    if (!known.length) return NaN;
    return by === "max" ? known.reduce((a, b) => Math.max(a, b)) : known.reduce((a, b) => a + b, 0) / known.length;
  }

  function describe(response) {
    const parts = data.orders.filter(({ by }) => by !== "place").map((order) => [order, summarize(response, order)]);
    parts.splice(parts[0][0].by === "reward" ? 1 : 0, 0, ...Object.entries(response.parts ?? {}).map(([label, value]) => [{ label, unit: "" }, value]));
    return parts.filter(([, value]) => !Number.isNaN(value)).map(([{ label, unit }, value]) => `${label} ${withUnit(value, unit, 3)}`).join(" · ");
  }

  // What the response was rewarded with, for the list.
  const advantage = data.quantities.findIndex(({ column }) => column === "advantage");
  function outcomeOf(response) {
    const mean = advantage < 0 ? NaN : summarize(response, { by: "mean", quantity: advantage });
    const numbers = [["reward", response.reward ?? NaN], ...Object.entries(response.parts ?? {}), ["Â", mean]];
    const parts = numbers.filter(([, value]) => !Number.isNaN(value));
    return parts.map(([name, value]) => `${name} ${show(value, 3)}`).join(" · ");
  }

  function makeToken(response, index) {
    const text = data.tokens[response.tokens[index]];
    const span = make("span", "token");
    for (const piece of text.split(/([\n\r\t])/)) {
      if (!(piece in MARKS)) {
        span.append(visible(piece));
        continue;
      }
      const mark = make("span", "", piece);
      mark.dataset.mark = MARKS[piece];
      span.append(mark);
    }
    if (text === "") span.dataset.mark = "∅";
    if (!text.trim()) span.setAttribute("aria-label", spelled(text));
    span.dataset.index = index;
    span.tabIndex = index ? -1 : 0;
    span.setAttribute("role", "option");
    return span;
  }

  function makeTokens(response) {
    const list = make("div", "words");
    list.setAttribute("role", "listbox");
    list.setAttribute("aria-orientation", "horizontal");
    list.setAttribute("aria-label", `Tokens of response ${response.response}`);
    response.tokens.forEach((_, index) => {
      const missing = response.starts.has(index) ? response.positions[index] - (index ? response.positions[index - 1] : -1) - 1 : 0;
      if (missing) {
        const gap = make("span", "gap", `⋯${missing}⋯`);
        gap.title = `${missing} tokens that the table does not have, such as a tool's output`;
        gap.setAttribute("role", "presentation");
        list.append(gap);
      }
      list.append(makeToken(response, index));
    });
    return list;
  }

  function open(response) {
    if (response.article) return response.article;
    const article = make("article", "response");
    article.dataset.response = response.response;
    article.append(make("h3", "", `Response ${response.response}`), make("p", "summary", describe(response)));
    if (response.prompt !== undefined) {
      const prompt = make("details", "prompt");
      prompt.append(make("summary", "", "Prompt"), make("pre", "", visible(data.prompts[response.prompt])));
      article.append(prompt);
    }
    article.append(makeTokens(response));
    response.article = article;
    shade(response);
    return article;
  }

  function shade(response) {
    const quantity = data.quantities[state.quantity];
    const stops = inks(quantity.scale);
    const values = response.values[state.quantity];
    for (const span of response.article.querySelectorAll(".token")) {
      const value = values[span.dataset.index];
      const unknown = Number.isNaN(value);
      const rgb = unknown ? null : mix(stops, fractionOf(quantity, value));
      span.classList.toggle("unknown", unknown);
      span.classList.toggle("marked", quantity.mark !== null && Math.abs(value) >= quantity.mark && value !== 0);
      span.style.backgroundColor = unknown ? "" : `rgb(${rgb})`;
      span.style.color = unknown ? "" : textOn(rgb);
    }
  }

  // ---- all of them ----

  function showResponses() {
    const shown = state.printing ? state.sorted : [state.current];
    element("responses").replaceChildren(...shown.map(open));
    shown.forEach(shade);
    const at = state.sorted.indexOf(state.current);
    element("place").textContent = `${at + 1} of ${responses.length}`;
    element("previous").disabled = at === 0;
    element("next").disabled = at === responses.length - 1;
    for (const button of element("list").querySelectorAll("button")) {
      const here = Number(button.dataset.place) === state.current.place;
      button.setAttribute("aria-current", String(here));
      if (here) {
        const list = element("list");
        const top = button.parentElement.offsetTop;
        const outside = top < list.scrollTop || top + button.offsetHeight > list.scrollTop + list.clientHeight;
        if (outside) list.scrollTop = top - list.clientHeight / 2;
      }
    }
    hide();
  }

  function showList() {
    const order = data.orders[element("order").value];
    const direction = (order.by === "place" ? 1 : -1) * (element("reversed").checked ? -1 : 1);
    const keys = new Map(responses.map((response) => [response, summarize(response, order)]));
    // Where the value is unknown: last, either way round.
    const rank = (a, b) => Number.isNaN(keys.get(a)) - Number.isNaN(keys.get(b)) || direction * (keys.get(a) - keys.get(b)) || a.place - b.place;
    state.sorted = [...responses].sort((a, b) => rank(a, b));
    element("list").replaceChildren(...state.sorted.map((response) => {
      const item = make("li");
      const button = make("button", "", `Response ${response.response}`);
      const value = keys.get(response);
      const key = order.by === "place" ? `${response.tokens.length} tokens` : Number.isNaN(value) ? "–" : withUnit(value, order.unit, 3);
      button.type = "button";
      button.dataset.place = response.place;
      button.append(make("span", "key", key));
      const outcome = outcomeOf(response);
      if (outcome) button.append(make("span", "outcome", outcome));
      item.append(button);
      return item;
    }));
  }

  function showLegend() {
    const quantity = data.quantities[state.quantity];
    const { low, high, scale, unit, reverse } = quantity;
    const bar = make("div", "bar");
    const stops = [...inks(scale)];
    bar.style.backgroundImage = `linear-gradient(to right, ${(reverse ? stops.reverse() : stops).join(", ")})`;
    const ticks = make("div", "ticks");
    ticksOf(quantity).forEach(([value, at]) => {
      const tick = make("span", "", show(value, 2));
      tick.style.left = `${100 * at}%`;
      ticks.append(tick);
    });
    const caption = make("p", "caption", `${quantity.label}${unit ? ` (${unit})` : ""}${{ log: ", log scale", ranked: ", by rank of its size" }[scale] ?? ""}`);
    const unknown = make("span", "token unknown", quantity.missing);
    const some = responses.some((response) => response.values[state.quantity].some(Number.isNaN));
    const marked = quantity.mark === null ? [] : [make("span", "token marked", "largest 5 % of the tokens")];
    element("legend").replaceChildren(caption, bar, ticks, ...marked, ...(some ? [unknown] : []));
    element("meaning").textContent = quantity.definition;
    const beyond = responses.flatMap(({ values }) => Array.from(values[state.quantity].filter((value) => value < low || value > high)));
    if (beyond.length) element("meaning").textContent += ` ${beyond.length.toLocaleString("en")} ${beyond.length === 1 ? "token lies" : "tokens lie"} outside the scale.`;
  }

  function ticksOf({ low, high, scale, ranks }) {
    if (scale === "ranked") {
      const quarter = ranks[Math.round(0.75 * (ranks.length - 1))];
      return [[low, 0], [-quarter, 0.25], [0, 0.5], [quarter, 0.75], [high, 1]];
    }
    if (scale !== "log") return [0, 0.25, 0.5, 0.75, 1].map((at) => [low + at * (high - low), at]);
    const decades = Math.log10(high / low);
    const count = decades < 1 ? 2 : decades < 3 ? 3 : 5;
    return Array.from({ length: count }, (_, index) => [low * 10 ** ((decades * index) / (count - 1)), index / (count - 1)]);
  }

  // ---- the numbers of one token ----

  const tooltip = element("tooltip");
  const hide = () => {
    tooltip.hidden = true;
  };

  function tell(span) {
    const response = responses.find(({ article }) => article?.contains(span));
    const index = Number(span.dataset.index);
    const id = response.tokens[index];
    const rows = make("table");
    data.quantities.forEach((quantity, number) => {
      const row = make("tr", number === state.quantity ? "chosen" : "");
      const value = response.values[number][index];
      const text = Number.isNaN(value) ? quantity.missing : withUnit(value, quantity.unit);
      const cell = make("td", "", text);
      cell.dataset.column = quantity.column;
      row.append(make("th", "", quantity.label), cell);
      row.firstChild.scope = "row";
      rows.append(row);
    });
    const where = `position ${response.positions[index]} of response ${response.response}`;
    tooltip.replaceChildren(make("p", "name", spelled(data.tokens[id])), make("p", "where", where), rows);
    for (const earlier of document.querySelectorAll("[aria-describedby=tooltip]")) earlier.removeAttribute("aria-describedby");
    span.setAttribute("aria-describedby", "tooltip");
    tooltip.hidden = false;
    const box = span.getClientRects()[span.getClientRects().length - 1];
    const { offsetWidth: width, offsetHeight: height } = tooltip;
    const words = span.parentElement.getBoundingClientRect();
    if (innerWidth - words.right > width + 16) {
      // Beside the text, which stays readable.
      tooltip.style.left = `${words.right + 12}px`;
      tooltip.style.top = `${Math.max(8, Math.min(box.top, innerHeight - height - 8))}px`;
      return;
    }
    const below = box.bottom + 8 + height < innerHeight || box.top < height + 8;
    tooltip.style.left = `${Math.max(8, Math.min(box.left, document.documentElement.clientWidth - width - 8))}px`;
    tooltip.style.top = `${below ? box.bottom + 8 : box.top - height - 8}px`;
  }

  // ---- keys and pointer ----

  function move(span, key) {
    const all = [...span.parentElement.querySelectorAll(".token")];
    const at = all.indexOf(span);
    const here = span.getBoundingClientRect();
    const middle = (box) => box.left + box.width / 2;
    const onLine = (candidates) => {
      const boxes = candidates.map((candidate) => candidate.getBoundingClientRect());
      const first = boxes.findIndex((box) => Math.abs(box.top - here.top) > here.height / 2);
      if (first < 0) return span;
      const line = candidates.filter((_, index) => index >= first && Math.abs(boxes[index].top - boxes[first].top) < here.height / 2);
      const away = (candidate) => Math.abs(middle(candidate.getBoundingClientRect()) - middle(here));
      return line.reduce((best, candidate) => (away(candidate) < away(best) ? candidate : best));
    };
    const steps = {
      ArrowRight: () => all[at + 1] ?? span, ArrowLeft: () => all[at - 1] ?? span, Home: () => all[0], End: () => all.at(-1),
      ArrowDown: () => onLine(all.slice(at + 1)), ArrowUp: () => onLine(all.slice(0, at).reverse()),
    };
    return steps[key]?.();
  }

  function goTo(response, { focus = false } = {}) {
    if (!response) return;
    state.current = response;
    showResponses();
    if (focus) response.article.querySelector(".token[tabindex='0']").focus({ preventScroll: false });
  }

  function shadeBy(number) {
    state.quantity = number;
    element("quantity").value = number;
    showLegend();
    responses.filter(({ article }) => article).forEach(shade);
    const told = document.querySelector("[aria-describedby=tooltip]");
    if (!tooltip.hidden && told) tell(told);
  }

  const step = (by, settings) => goTo(state.sorted[state.sorted.indexOf(state.current) + by], settings);

  element("viewer").addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.matches("select")) return;
    const span = event.target.closest(".token[data-index]");
    const next = span && move(span, event.key);
    if (next) {
      event.preventDefault();
      next.focus();
    } else if (event.key === "n" || event.key === "p") step(event.key === "n" ? 1 : -1, { focus: Boolean(span) });
    else if (/^[1-9]$/.test(event.key) && event.key <= data.quantities.length) shadeBy(event.key - 1);
  });
  addEventListener("keydown", (event) => {
    if (event.key === "Escape") hide();
  });
  element("responses").addEventListener("focusin", (event) => {
    const span = event.target.closest(".token");
    if (!span) return;
    for (const other of span.parentElement.querySelectorAll(".token[tabindex='0']")) {
      other.tabIndex = -1;
      other.removeAttribute("aria-selected");
    }
    span.tabIndex = 0;
    span.setAttribute("aria-selected", "true");
    tell(span);
  });
  element("responses").addEventListener("focusout", hide);
  element("responses").addEventListener("mouseover", (event) => {
    const span = event.target.closest(".token");
    if (span) tell(span);
  });
  element("responses").addEventListener("mouseout", () => {
    const focused = document.activeElement?.closest(".token[data-index]");
    if (focused) tell(focused);
    else hide();
  });
  addEventListener("scroll", () => {
    const told = document.querySelector("[aria-describedby=tooltip]");
    if (!tooltip.hidden && told) tell(told);
  }, { passive: true });
  element("previous").addEventListener("click", () => step(-1));
  element("next").addEventListener("click", () => step(1));
  element("list").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) goTo(responses[button.dataset.place]);
  });
  element("quantity").addEventListener("change", (event) => shadeBy(Number(event.target.value)));
  for (const id of ["order", "reversed"]) {
    element(id).addEventListener("change", () => {
      showList();
      goTo(state.sorted[0]);
    });
  }
  const repaint = (printing) => {
    state.printing = printing;
    showLegend();
    showResponses();
  };
  for (const media of [dark, paper]) media.addEventListener("change", () => repaint(paper.matches));
  addEventListener("beforeprint", () => repaint(true));
  addEventListener("afterprint", () => repaint(false));

  data.orders.forEach(({ label }, number) => element("order").append(new Option(label, number)));
  // A link to #token-RESPONSE-POSITION opens that token.
  const follow = () => {
    const [, response, position] = location.hash.match(/^#token-(\d+)-(\d+)$/)?.map(Number) ?? [];
    const wanted = responses.find((one) => one.response === response);
    if (!wanted) return;
    goTo(wanted);
    const span = wanted.article.querySelector(`[data-index="${wanted.positions.indexOf(position)}"]`);
    span?.focus();
    span?.scrollIntoView({ block: "center" });
  };
  addEventListener("hashchange", follow);
  addEventListener("click", (event) => {
    // Once more to where one was already.
    if (event.target.closest("a[href^='#token-']")?.hash === location.hash) follow();
  });
  element("quantity").value = state.quantity;
  element("viewer").hidden = false;
  showList();
  repaint(paper.matches);
  follow();
})();
