// Runs before the page is drawn: the wrong theme must not flash. "auto" follows the system.
(() => {
  const THEMES = ["auto", "light", "dark"];
  let theme = "auto";
  try {
    theme = localStorage.getItem("swarm.theme") ?? "auto";
  } catch {
    // storage may be forbidden: the choice then lasts as long as the page
  }
  const apply = () => {
    if (!THEMES.includes(theme)) theme = "auto";
    document.documentElement.dataset.theme = theme;
  };
  apply();
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme-button");
    const name = document.getElementById("theme-name");
    const show = () => {
      apply();
      name.textContent = theme[0].toUpperCase() + theme.slice(1);
      button.setAttribute("aria-label", `Theme: ${theme}`);
    };
    show();
    button.addEventListener("click", () => {
      theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
      show();
      try {
        localStorage.setItem("swarm.theme", theme);
      } catch {
        // storage may be forbidden
      }
    });
  });
})();
