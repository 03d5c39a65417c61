// Runs before the page is painted, so that a remembered scheme never flashes the other one.
"use strict";
try {
  const theme = localStorage.getItem("headgate.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be forbidden; then the system's scheme holds.
}
