// Folded sections: a link to one unfolds it, a button unfolds all of them, and print shows all of them.

import { element } from "./dom.js";

function start() {
  const folds = [...document.querySelectorAll("section > details")];
  if (!folds.length) return;
  const reveal = () => {
    const fold = document.getElementById(location.hash.slice(1))?.closest("section > details");
    if (fold) fold.open = true;
  };
  addEventListener("hashchange", reveal);
  addEventListener("beforeprint", () => folds.forEach((fold) => (fold.open = true)));
  document.querySelectorAll("nav a").forEach((link) => link.addEventListener("click", () => setTimeout(reveal)));
  const button = element("button", { type: "button", class: "unfold" }, "unfold all");
  const name = () => (button.textContent = folds.some((fold) => !fold.open) ? "unfold all" : "fold all");
  button.addEventListener("click", () => {
    const open = folds.some((fold) => !fold.open);
    folds.forEach((fold) => (fold.open = open));
    name(); // the event "toggle" comes later
  });
  folds.forEach((fold) => fold.addEventListener("toggle", name));
  document.querySelector("nav")?.append(button);
  reveal();
}

start();
