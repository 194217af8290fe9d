// On paper nothing can be opened: what is folded unfolds while printing, and folds again afterwards.
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
  paper.addEventListener("change", () => (paper.matches ? unfold() : fold()));
  addEventListener("beforeprint", unfold);
  addEventListener("afterprint", fold);
})();
