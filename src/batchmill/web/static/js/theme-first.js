// Runs before the first paint, so that a dark page does not flash.
(() => {
  try {
    const theme = localStorage.getItem("batchmill.theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage is not allowed: the theme follows the system.
  }
})();
