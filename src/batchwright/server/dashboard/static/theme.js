// The theme: light, dark or the system's. Loaded before the page is drawn, so that it never flashes in the wrong one.

const NAME = "batchwright.theme";
const THEMES = ["auto", "light", "dark"];

function stored() {
  try {
    const theme = localStorage.getItem(NAME);
    return THEMES.includes(theme) ? theme : "auto";
  } catch {
    return "auto"; // storage is switched off
  }
}

function apply(theme) {
  document.documentElement.dataset.theme = theme;
}

/** A button that switches to the next theme. */
export function connectTheme(button) {
  const label = () => {
    button.textContent = `Theme: ${document.documentElement.dataset.theme}`;
  };
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
    apply(next);
    try {
      localStorage.setItem(NAME, next);
    } catch {
      // The theme then lasts until the page is closed.
    }
    label();
  });
  label();
}

apply(stored());
