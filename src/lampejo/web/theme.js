// Runs before the first paint, so that a chosen theme does not flash in the other one. Not a module: modules wait.
try {
  const theme = localStorage.getItem("lampejo.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // No storage: the system's theme.
}
