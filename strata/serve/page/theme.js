// The colours the reader chose, set before anything is painted: light, dark, or the system's.
"use strict";

try {
  document.documentElement.dataset.theme = localStorage.getItem("strata.theme") || "system";
} catch {
  document.documentElement.dataset.theme = "system"; // a browser that keeps nothing still shows the page
}
