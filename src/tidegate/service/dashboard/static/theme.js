// Light, dark, or as the system says. Loaded before the page is drawn, so that it never flashes.
"use strict";
{
  const THEMES = ["auto", "light", "dark"];
  const root = document.documentElement;

  function chosen() {
    try {
      const found = localStorage.getItem("tidegate-theme");
      return THEMES.includes(found) ? found : "auto";
    } catch {
      return "auto"; // storage is switched off
    }
  }

  function show(theme) {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${theme}`;
  }

  show(chosen());
  document.addEventListener("DOMContentLoaded", () => {
    show(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      const next = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
      try {
        localStorage.setItem("tidegate-theme", next);
      } catch {
        // then it lasts as long as the page
      }
      show(next);
    });
  });
}
