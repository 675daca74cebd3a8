// The theme: light, dark, or that of the system.

import { element } from "./dom.js";

const NAMES = ["auto", "light", "dark"];

function start() {
  const header = document.querySelector("header");
  if (!header) return;
  let now = "auto";
  const button = element("button", { type: "button", class: "theme", title: "change the theme: auto, light or dark" });
  const show = () => {
    if (now === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = now;
    button.textContent = `theme: ${now}`;
    document.dispatchEvent(new Event("attnlab-theme"));
  };
  button.addEventListener("click", () => {
    now = NAMES[(NAMES.indexOf(now) + 1) % NAMES.length];
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  header.append(button);
  show();
}

start();
