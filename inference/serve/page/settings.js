// What the form above every view holds, kept in this browser; the key only until it is closed.

const DEFAULTS = { temperature: "0.7", top_p: "1", top_k: "", max_tokens: "", seed: "", system: "", rater: "" };
const settings = document.getElementById("settings");

function kept() {
  try {
    return JSON.parse(localStorage.getItem("settings")) ?? {};
  } catch {
    return {};
  }
}

const values = { ...DEFAULTS, ...kept(), key: sessionStorage.getItem("key") ?? "" };

export function initialize() {
  for (const field of settings.elements) {
    if (!field.name) continue;
    field.value = values[field.name] ?? "";
    field.addEventListener("input", () => {
      values[field.name] = field.value;
      const { key, ...others } = values;
      localStorage.setItem("settings", JSON.stringify(others));
      sessionStorage.setItem("key", key);
    });
  }
  settings.addEventListener("submit", (event) => event.preventDefault());
  const opener = document.getElementById("open-settings");
  opener.addEventListener("click", () => {
    settings.hidden = !settings.hidden;
    opener.setAttribute("aria-expanded", String(!settings.hidden));
  });
}

export const key = () => values.key.trim();
export const rater = () => values.rater.trim();
export const system = () => values.system.trim();

// The fields of a request; `seed` is drawn here, so that several models can have the same one.
export function sampling() {
  const fields = { seed: values.seed === "" ? drawSeed() : Math.trunc(Number(values.seed)) };
  for (const name of ["temperature", "top_p", "top_k", "max_tokens"]) {
    if (values[name] !== "" && Number.isFinite(Number(values[name]))) fields[name] = Number(values[name]);
  }
  return fields;
}

export function drawSeed() {
  return crypto.getRandomValues(new Uint32Array(1))[0] >>> 1;
}
