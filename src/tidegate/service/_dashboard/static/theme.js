// The colour theme: light, dark, or that of the system. Loaded before the body, so that no wrong colours flash.
"use strict";
{
  const THEMES = ["auto", "light", "dark"];
  const root = document.documentElement;

  function readTheme() {
    try {
      const stored = localStorage.getItem("tidegate-theme");
      return THEMES.includes(stored) ? stored : "auto";
    } catch {
      return "auto"; // the browser blocks localStorage
    }
  }

  function applyTheme(theme) {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${theme}`;
  }

  applyTheme(readTheme());
  document.addEventListener("DOMContentLoaded", () => {
    applyTheme(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      const next = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
      try {
        localStorage.setItem("tidegate-theme", next);
      } catch {
        // The theme then lasts until the page is reloaded.
      }
      applyTheme(next);
    });
  });
}
