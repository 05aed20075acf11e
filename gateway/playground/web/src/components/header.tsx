import { useEffect, useRef, useState } from "preact/hooks";
import type { Gateway } from "../use-gateway";
import type { Model } from "../wire";

const ABOUT =
  "Outrider serves language models with speculative decoding: several tokens are drafted, the model checks them in one pass, " +
  "and the answer is the model's own.";

interface Props {
  gateway: Gateway;
  model: Model | null;
  choose: (id: string) => void;
  version: string;
}

export function Header({ gateway, model, choose, version }: Props) {
  return (
    <header>
      <h1>
        <Mark /> Outrider <span class="quiet">playground</span>
      </h1>
      <p class="serving" role="status">
        {model !== null && !gateway.trouble ? (
          <>
            {gateway.models.length > 1 ? (
              <select aria-label="Model" value={model.id} onChange={(event) => choose(event.currentTarget.value)}>
                {gateway.models.map(({ id }) => (
                  <option key={id} value={id}>
                    {id}
                  </option>
                ))}
              </select>
            ) : (
              <span class="mono">{model.id}</span>
            )}
            <span class="quiet"> context of {model.max_model_len} tokens</span>
            {version && <span class="quiet version"> · v{version}</span>}
          </>
        ) : (
          <span class={gateway.trouble ? "trouble" : "quiet"}>{gateway.trouble || "Loading model information…"}</span>
        )}
      </p>
      <KeyField gateway={gateway} />
      <ThemeChoice />
      <p class="about">
        {ABOUT} {gateway.docs && <a href={gateway.docs}>API documentation</a>}
      </p>
    </header>
  );
}

function Mark() {
  return (
    <svg class="mark" viewBox="0 0 30 12" width="30" height="12" aria-hidden="true">
      <circle class="accepted" cx="5" cy="6" r="4" />
      <circle class="accepted" cx="15" cy="6" r="4" />
      <circle class="bonus" cx="25" cy="6" r="3.2" />
    </svg>
  );
}

function KeyField({ gateway }: { gateway: Gateway }) {
  const [text, setText] = useState(gateway.api.key);
  const details = useRef<HTMLDetailsElement>(null);
  useEffect(() => {
    if (gateway.needsKey && details.current !== null) details.current.open = true;
  }, [gateway.needsKey]);
  const keep = (event: Event) => {
    event.preventDefault();
    gateway.setKey(text.trim());
    if (details.current !== null) details.current.open = false;
  };
  return (
    <details class="menu" ref={details}>
      <summary>
        API key{" "}
        <span class="quiet">{gateway.needsKey ? "required" : gateway.api.key ? "set" : "none"}</span>
      </summary>
      <form onSubmit={keep}>
        <label for="api-key">API key</label>
        <input
          id="api-key"
          type="password"
          autocomplete="off"
          spellcheck={false}
          value={text}
          aria-invalid={gateway.needsKey}
          onInput={(event) => setText(event.currentTarget.value)}
        />
        <p class="hint">Stored in this tab until it is closed, and sent only to this gateway.</p>
        <button type="submit">Use this key</button>
      </form>
    </details>
  );
}

const THEMES = ["auto", "light", "dark"] as const;
type Theme = (typeof THEMES)[number];
const THEME = "outrider.theme";

function ThemeChoice() {
  const [theme, setTheme] = useState<Theme>(() => THEMES.find((one) => one === localStorage.getItem(THEME)) ?? "auto");
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem(THEME, theme);
  }, [theme]);
  return (
    <label class="theme">
      <span class="quiet">Theme</span>
      <select value={theme} onChange={(event) => setTheme(event.currentTarget.value as Theme)}>
        {THEMES.map((one) => (
          <option key={one} value={one}>
            {one}
          </option>
        ))}
      </select>
    </label>
  );
}
