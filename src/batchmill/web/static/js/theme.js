// The theme: light, dark, or that of the system.

const KEY = "batchmill.theme";

export function startTheme(select, changed) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  select.value = document.documentElement.dataset.theme ?? "auto";
  select.addEventListener("change", () => {
    if (select.value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = select.value;
    try {
      localStorage.setItem(KEY, select.value);
    } catch {
      // Storage is not allowed: the choice is for this visit.
    }
    changed();
  });
  system.addEventListener("change", changed);
}
