// The token viewer. Text from models only ever goes through textContent.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("viewer-data").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paper = matchMedia("print");
  const element = (id) => document.getElementById(id);
  const make = (tag, className, text, attributes = {}) => {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
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
  const rankOf = (ranks, size) => Math.max(0, ranks.findLastIndex((limit) => limit <= size)) / (ranks.length - 1);

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

  // A quantity's numbers of a response, decoded once they are asked for.
  function valuesOf(response, number) {
    const { values } = response;
    if (typeof values[number] === "string") {
      values[number] = new Float32Array(Uint8Array.from(atob(values[number]), (character) => character.charCodeAt(0)).buffer);
    }
    return values[number];
  }

  const responses = data.responses.map((entry, place) => {
    const starts = new Map(entry.jumps);
    let position = -1;
    return {
      ...entry, place, starts, article: null, key: entry.group ?? entry.prompt ?? place,
      positions: entry.tokens.map((_, index) => (position = starts.get(index) ?? position + 1)),
    };
  });
  const numbered = new Map(responses.map((response) => [String(response.response), response]));
  const firsts = new Map([...responses].reverse().map((response) => [response.key, response])); // of each prompt

  const none = [];
  const opened = responses.find(({ response }) => response === data.first) ?? responses[0];
  const state = { quantity: data.shade, sorted: responses, current: opened, printing: paper.matches, shown: [], matches: new Map(), found: [], at: 0, here: null };

  // ---- one response ----

  // What shades, of a response: the sum of shares, the mean of anything else.
  function summarize(response, number) {
    const known = valuesOf(response, number).filter((value) => !Number.isNaN(value));
    const sum = known.reduce((a, b) => a + b, 0);
    return known.length && data.quantities[number].unit !== "%" ? sum / known.length : known.length ? sum : NaN;
  }

  // What the response was rewarded with, and what it holds of the gradient.
  const columnOf = (name) => data.quantities.findIndex(({ column }) => column === name);
  const told = [["Â", columnOf("advantage"), ""], ["share", columnOf("gradient_percent"), "%"]].filter(([, number]) => number >= 0);
  function describe(response) {
    const numbers = [["reward", response.reward ?? NaN, ""], ...Object.entries(response.parts ?? {}).map(([name, value]) => [name, value, ""])];
    numbers.push(...told.map(([name, number, unit]) => [name, summarize(response, number), unit]));
    return numbers.filter(([, value]) => !Number.isNaN(value)).map(([name, value, unit]) => `${name} ${withUnit(value, unit, 3)}`).join(" · ");
  }

  function makeToken(response, index) {
    const text = data.tokens[response.tokens[index]];
    const span = make("span", "token", "", { role: "option", tabindex: index ? -1 : 0, "data-index": index });
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
    return span;
  }

  function makeTokens(response) {
    const name = `Tokens of response ${response.response}`;
    const list = make("div", "words", "", { role: "listbox", "aria-orientation": "horizontal", "aria-label": name });
    response.tokens.forEach((_, index) => {
      const missing = response.starts.has(index) ? response.positions[index] - (index ? response.positions[index - 1] : -1) - 1 : 0;
      if (missing) {
        const title = `${missing} tokens that the table does not have, such as a tool's output`;
        list.append(make("span", "gap", `⋯${missing}⋯`, { title, role: "presentation" }));
      }
      list.append(makeToken(response, index));
    });
    return list;
  }

  function open(response) {
    if (response.article) return response.article;
    const article = make("article", "response", "", { "data-response": response.response });
    article.append(make("h3", "", `Response ${response.response}`));
    article.append(make("p", "summary", [describe(response), `${response.tokens.length} tokens`].filter(Boolean).join(" · ")));
    article.append(makeTokens(response));
    response.article = article;
    response.spans = [...article.querySelectorAll(".token")];
    return article;
  }

  // The prompt, once above the responses to it.
  const texts = new Map();
  function promptOf({ key, prompt }) {
    if (prompt === undefined) return [];
    if (!texts.has(key)) {
      const details = make("details", "prompt");
      details.append(make("summary", "", nameOf(key)), make("pre", "", visible(data.prompts[prompt])));
      texts.set(key, details);
    }
    return [texts.get(key)];
  }
  const inOneLine = (prompt) => visible(prompt).replace(/\s+/g, " ").trim();
  // Prompts that begin alike, such as with the same worked examples, are told apart by how they end.
  const alike = data.prompts?.length > 1 && new Set(data.prompts.map((one) => inOneLine(one).slice(0, 70))).size === 1;
  const nameOf = (key) => {
    const { prompt } = firsts.get(key);
    const text = prompt === undefined ? "" : inOneLine(data.prompts[prompt]);
    const part = text.length <= 70 ? text : alike ? `…${text.slice(-70)}` : `${text.slice(0, 70)}…`;
    return `Prompt ${key}${part ? `: ${part}` : ""}`;
  };

  function shade(response) {
    const quantity = data.quantities[state.quantity];
    const stops = inks(quantity.scale);
    const look = [state.quantity, ...stops].join();
    if (response.look === look) return;
    response.look = look;
    const values = valuesOf(response, state.quantity);
    response.spans.forEach((span, index) => {
      const value = values[index];
      const unknown = Number.isNaN(value);
      const rgb = unknown ? null : mix(stops, fractionOf(quantity, value));
      span.classList.toggle("unknown", unknown);
      span.classList.toggle("marked", quantity.mark !== null && Math.abs(value) >= quantity.mark && value !== 0);
      span.style.backgroundColor = unknown ? "" : `rgb(${rgb})`;
      span.style.color = unknown ? "" : textOn(rgb);
    });
  }

  // Matches of the search, and the one place that a link or the search has led to.
  function mark(response) {
    const matches = state.matches.get(response) ?? none;
    const here = state.here?.response === response ? [state.here] : [];
    if (response.matches === matches && !here.length && !response.wasHere) return;
    Object.assign(response, { matches, wasHere: here.length > 0 });
    for (const span of response.article.querySelectorAll(".found, .here")) span.classList.remove("found", "here");
    for (const [ranges, name] of [[matches, "found"], [here, "here"]]) {
      for (const { from, to } of ranges) for (const span of response.spans.slice(from, to + 1)) span.classList.add(name);
    }
  }

  // ---- all of them ----

  function showResponses() {
    const beside = element("beside").checked && !state.printing;
    const shown = state.printing ? state.sorted : beside ? state.sorted.filter(({ key }) => key === state.current.key) : [state.current];
    const nodes = shown.flatMap((response, place) => (response.key === shown[place - 1]?.key ? [] : promptOf(response)).concat(open(response)));
    if (nodes.length !== state.shown.length || nodes.some((node, place) => node !== state.shown[place])) element("responses").replaceChildren(...nodes);
    state.shown = nodes;
    shown.forEach(shade);
    shown.forEach(mark);
    for (const { article, place } of shown) article.toggleAttribute("aria-current", place === state.current.place);
    const at = state.sorted.indexOf(state.current);
    element("place").textContent = `${at + 1} of ${state.sorted.length}`;
    element("previous").disabled = at === 0;
    element("next").disabled = at === state.sorted.length - 1;
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
    const by = element("order").value;
    const { unit } = data.quantities[state.quantity];
    const keyOf = { place: ({ place }) => -place, reward: ({ reward }) => reward ?? NaN, length: ({ tokens }) => tokens.length, shade: (one) => summarize(one, state.quantity) }[by];
    const direction = element("reversed").checked ? 1 : -1;
    const kept = responses.filter(({ key }) => element("prompt").value === "" || String(key) === element("prompt").value);
    const keys = new Map(kept.map((response) => [response, keyOf(response)]));
    // Where the value is unknown: last, either way round.
    const rank = (a, b) => Number.isNaN(keys.get(a)) - Number.isNaN(keys.get(b)) || direction * (keys.get(a) - keys.get(b)) || a.place - b.place;
    state.sorted = kept.sort(rank);
    element("list").replaceChildren(...state.sorted.map((response) => {
      const item = make("li");
      const button = make("button", "", `Response ${response.response}`, { type: "button", "data-place": response.place });
      const value = keys.get(response);
      const key = by !== "shade" ? `${response.tokens.length} tokens` : Number.isNaN(value) ? "–" : withUnit(value, unit, 3);
      button.append(make("span", "key", key));
      const outcome = describe(response);
      if (outcome) button.append(make("span", "outcome", outcome));
      item.append(button);
      return item;
    }));
  }

  // ---- search ----

  const lowered = data.tokens.map((token) => token.toLowerCase());
  function matchesIn(response, text) {
    const pieces = response.tokens.map((token) => lowered[token]);
    const whole = pieces.join("");
    const found = [];
    let [index, end] = [0, pieces[0].length]; // of the token that the match begins in
    for (let at = whole.indexOf(text); at >= 0; at = whole.indexOf(text, at + text.length)) {
      while (end <= at) end += pieces[++index].length;
      let [to, reach] = [index, end];
      while (reach < at + text.length) reach += pieces[++to].length;
      found.push({ response, from: index, to });
    }
    return found;
  }

  function search() {
    const text = element("find").value.toLowerCase().replaceAll("↵", "\n").replaceAll("␣", " ");
    const found = state.sorted.map((response) => [response, text ? matchesIn(response, text) : none]);
    state.matches = new Map(found);
    state.found = found.flatMap(([, matches]) => matches);
    for (const id of ["earlier", "later"]) element(id).disabled = !state.found.length;
    element("found").textContent = text ? "no match" : "";
    const from = state.sorted.indexOf(state.current);
    state.at = Math.max(0, state.found.findIndex(({ response }) => state.sorted.indexOf(response) >= from));
    if (state.found.length) visit(0);
    else showResponses();
  }

  function visit(by) {
    const count = state.found.length;
    if (!count) return;
    state.at = (state.at + by + count) % count;
    element("found").textContent = `${(state.at + 1).toLocaleString("en")} of ${count.toLocaleString("en")}`;
    arrive(state.found[state.at]);
  }

  // Show these tokens of a response, highlighted.
  function arrive(here, { focus = false } = {}) {
    state.here = here;
    goTo(here.response);
    const span = here.response.spans[here.from];
    if (focus) span.focus({ preventScroll: true });
    tell(span);
    span.scrollIntoView({ block: "center" });
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
    const all = responses.map((response) => valuesOf(response, state.quantity));
    const some = all.some((values) => values.some(Number.isNaN));
    const marked = quantity.mark === null ? [] : [make("span", "token marked", "largest 5 % of the tokens")];
    element("legend").replaceChildren(caption, bar, ticks, ...marked, ...(some ? [unknown] : []));
    element("meaning").textContent = quantity.definition;
    const beyond = all.reduce((count, values) => count + values.filter((value) => value < low || value > high).length, 0);
    if (beyond) element("meaning").textContent += ` ${beyond.toLocaleString("en")} ${beyond === 1 ? "token lies" : "tokens lie"} outside the scale.`;
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

  const numbers = element("token-numbers");
  const hide = () => numbers.toggleAttribute("hidden", true);
  const describing = () => document.querySelector("[aria-describedby=token-numbers]");

  function tell(span) {
    const response = numbered.get(span.closest("article").dataset.response);
    const index = Number(span.dataset.index);
    const rows = make("table");
    data.quantities.forEach((quantity, number) => {
      const row = make("tr", number === state.quantity ? "chosen" : "");
      const value = valuesOf(response, number)[index];
      const told = Number.isNaN(value) ? quantity.missing : withUnit(value, quantity.unit);
      row.append(make("th", "", quantity.label, { scope: "row" }), make("td", "", told, { "data-column": quantity.column }));
      rows.append(row);
    });
    const where = `position ${response.positions[index]} of response ${response.response}`;
    const close = make("button", "close", "×", { type: "button", "aria-label": "Put the numbers away" });
    close.addEventListener("click", hide);
    numbers.replaceChildren(close, make("p", "name", spelled(data.tokens[response.tokens[index]])), make("p", "where", where), rows);
    describing()?.removeAttribute("aria-describedby");
    span.setAttribute("aria-describedby", "token-numbers");
    numbers.hidden = false;
  }

  // ---- keys and pointer ----

  function move(span, key) {
    const all = numbered.get(span.closest("article").dataset.response).spans;
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
    const { top, bottom } = response.article.getBoundingClientRect();
    if (bottom < 0 || top > innerHeight) response.article.scrollIntoView();
    if (focus) response.article.querySelector(".token[tabindex='0']").focus();
  }

  function shadeBy(number) {
    state.quantity = number;
    element("quantity").value = number;
    showLegend();
    const told = numbers.hidden ? null : describing();
    if (element("order").value === "shade") showList();
    showResponses();
    if (told?.isConnected) tell(told);
  }

  const step = (by, settings) => goTo(state.sorted[state.sorted.indexOf(state.current) + by], settings);

  element("viewer").addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.matches("select, input")) return;
    const span = event.target.closest(".token[data-index]");
    const next = span && move(span, event.key);
    if (next) {
      event.preventDefault();
      next.focus();
    } else if (event.key === "/") {
      event.preventDefault();
      element("find").focus();
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
  element("responses").addEventListener("mouseover", (event) => {
    const span = event.target.closest(".token");
    if (span) tell(span);
  });
  element("responses").addEventListener("mouseleave", () => {
    const focused = document.activeElement?.closest(".token[data-index]");
    if (focused) tell(focused);
  });
  element("find").addEventListener("input", search);
  element("find").addEventListener("keydown", (event) => {
    if (event.key === "Enter") visit(event.shiftKey ? -1 : 1);
  });
  element("earlier").addEventListener("click", () => visit(-1));
  element("later").addEventListener("click", () => visit(1));
  element("previous").addEventListener("click", () => step(-1));
  element("next").addEventListener("click", () => step(1));
  element("list").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) goTo(responses[button.dataset.place]);
  });
  element("quantity").addEventListener("change", (event) => shadeBy(Number(event.target.value)));
  for (const id of ["order", "reversed", "prompt"]) {
    element(id).addEventListener("change", () => {
      showList();
      goTo(state.sorted[0]);
      search();
    });
  }
  element("beside").addEventListener("change", showResponses);
  const repaint = (printing) => {
    state.printing = printing;
    showLegend();
    showResponses();
  };
  for (const media of [dark, paper]) media.addEventListener("change", () => repaint(paper.matches));
  addEventListener("beforeprint", () => repaint(true));
  addEventListener("afterprint", () => repaint(false));

  for (const key of [...firsts.keys()].sort((a, b) => a - b)) element("prompt").append(new Option(nameOf(key), key));
  element("prompt").parentElement.hidden = (opened.group ?? opened.prompt) === undefined || firsts.size < 2;
  element("beside").parentElement.hidden = firsts.size === responses.length;
  if (responses.every(({ reward }) => reward === undefined)) element("order").querySelector("[value=reward]").remove();
  // A link to #token-RESPONSE-POSITION opens that token, whatever was looked at.
  const follow = () => {
    const [, response, position] = location.hash.match(/^#token-(\d+)-(\d+)$/) ?? [];
    const wanted = numbered.get(response);
    const index = wanted ? wanted.positions.indexOf(Number(position)) : -1;
    if (index < 0) return;
    if (!state.sorted.includes(wanted)) {
      element("prompt").value = "";
      showList();
    }
    arrive({ response: wanted, from: index, to: index }, { focus: true });
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
