// Theme: as the system has it, or light, or dark.

const THEMES = ["auto", "light", "dark"];

function startTheme() {
  const button = byId("theme");
  let theme = "auto";
  const show = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    show();
  });
  show();
}
