// What is folded unfolds while printing, for on paper nothing can be opened, and folds again afterwards.
(() => {
  "use strict";
  const paper = matchMedia("print");
  let opened = [];
  const unfold = () => {
    for (const details of document.querySelectorAll("details:not([open])")) {
      details.open = true;
      opened.push(details);
    }
  };
  const fold = () => {
    for (const details of opened) details.open = false;
    opened = [];
  };
  // A link to a folded section opens it.
  const arrive = () => {
    const details = document.getElementById(location.hash.slice(1))?.querySelector(":scope > details.folded");
    if (details) details.open = true;
  };
  addEventListener("hashchange", arrive);
  arrive();
  // The contents mark the section that is read.
  const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
  const reading = new IntersectionObserver((entries) => {
    const entered = entries.find(({ isIntersecting }) => isIntersecting);
    if (!entered) return;
    for (const [id, link] of links) link.toggleAttribute("aria-current", id === entered.target.id);
  }, { rootMargin: "-20% 0px -79% 0px" });
  for (const id of links.keys()) reading.observe(document.getElementById(id));
  // A drawing that is wider than a phone is scrolled, by keys too.
  const reach = () => {
    for (const drawing of document.querySelectorAll(".drawing")) {
      if (drawing.scrollWidth > drawing.clientWidth) drawing.tabIndex = 0;
      else drawing.removeAttribute("tabindex");
    }
  };
  addEventListener("resize", reach);
  reach();
  paper.addEventListener("change", () => (paper.matches ? unfold() : fold()));
  addEventListener("beforeprint", unfold);
  addEventListener("afterprint", fold);
})();
