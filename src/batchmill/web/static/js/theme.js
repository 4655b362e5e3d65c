// Light, dark, or as the system has it.

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
      // Not allowed to remember: it is for this visit.
    }
    changed();
  });
  system.addEventListener("change", changed);
}
