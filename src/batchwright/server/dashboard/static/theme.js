// Light, dark, or what the system says. Loaded before the page is drawn, so that it never flashes in the other one.

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

/** A button that goes on to the next theme. */
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
      // It holds until the page is closed.
    }
    label();
  });
  label();
}

apply(stored());
