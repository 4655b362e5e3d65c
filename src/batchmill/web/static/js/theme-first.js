// Runs before the first paint, so that a page chosen to be dark does not flash.
(() => {
  try {
    const theme = localStorage.getItem("batchmill.theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Storage is not allowed: the system's colours it is.
  }
})();
