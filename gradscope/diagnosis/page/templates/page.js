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
