import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import type { NumberField, Settings } from "../settings";
import type { Model } from "../wire";

interface Props {
  settings: Settings;
  change: (part: Partial<Settings>) => void;
  model: Model | null;
  /** The field that the gateway refused. */
  refusedField: string | null;
}

/** The breakpoint of styles.css below which the layout is one column. */
const WIDE = "(min-width: 60rem)";

export function SettingsForm({ settings, change, model, refusedField }: Props) {
  const details = useRef<HTMLDetailsElement>(null);
  useEffect(() => {
    if (details.current !== null) details.current.open = matchMedia(WIDE).matches;
  }, []);
  const numbers = (fields: [NumberField, string, string][]) =>
    fields.map(([name, label, hint]) => (
      <Field key={name} label={label} id={name}>
        <input
          id={name}
          type="number"
          step="any"
          placeholder={hint}
          value={settings.numbers[name]}
          aria-invalid={refusedField === name}
          onInput={(event) => change({ numbers: { ...settings.numbers, [name]: event.currentTarget.value } })}
        />
      </Field>
    ));
  return (
    <details class="settings card" ref={details}>
      <summary>
        <h2>Settings</h2>
      </summary>
      <form aria-label="Settings" onSubmit={(event) => event.preventDefault()}>
        <fieldset>
          <legend>Speculation</legend>
          <Field label="Method" id="method">
            <select id="method" value={settings.method} onChange={(event) => change({ method: event.currentTarget.value })}>
              <option value="auto">auto</option>
              {model?.draft_methods.map((name) => (
                <option key={name} value={name}>
                  {name}
                </option>
              ))}
              <option value="off">off</option>
            </select>
          </Field>
          {numbers([["num_speculative_tokens", "Draft length", "default"]])}
          <Field label="Mode" id="mode">
            <select
              id="mode"
              value={settings.mode}
              onChange={(event) => change({ mode: event.currentTarget.value as Settings["mode"] })}
            >
              <option value="">default</option>
              <option value="exact">exact</option>
              <option value="rejection">rejection</option>
            </select>
          </Field>
          <label class="check">
            <input
              type="checkbox"
              checked={settings.tree}
              onChange={(event) => change({ tree: event.currentTarget.checked })}
            />
            Draft a tree of tokens
          </label>
          <Field label="Predicted output" id="prediction">
            <textarea
              id="prediction"
              rows={2}
              spellcheck={false}
              placeholder="The text that the answer edits"
              value={settings.prediction}
              aria-invalid={refusedField?.startsWith("prediction") ?? false}
              onInput={(event) => change({ prediction: event.currentTarget.value })}
            />
          </Field>
          <label class="check">
            <input
              type="checkbox"
              checked={settings.atOnce}
              onChange={(event) => change({ atOnce: event.currentTarget.checked })}
            />
            Compare both at once
          </label>
        </fieldset>
        <fieldset>
          <legend>Sampling</legend>
          {numbers([
            ["max_tokens", "Max tokens", "default"],
            ["temperature", "Temperature", "default"],
            ["seed", "Seed", "none"],
            ["top_p", "Top p", "1"],
            ["top_k", "Top k", "all"],
            ["min_p", "Min p", "0"],
          ])}
        </fieldset>
        <details class="more">
          <summary>Penalties and stop strings</summary>
          <fieldset>
            <legend class="unseen">Penalties and stop strings</legend>
            {numbers([
              ["presence_penalty", "Presence", "0"],
              ["frequency_penalty", "Frequency", "0"],
              ["repetition_penalty", "Repetition", "1"],
            ])}
            <Field label="Stop strings, one per line" id="stop">
              <textarea
                id="stop"
                rows={2}
                spellcheck={false}
                value={settings.stop}
                aria-invalid={refusedField === "stop"}
                onInput={(event) => change({ stop: event.currentTarget.value })}
              />
            </Field>
          </fieldset>
        </details>
      </form>
    </details>
  );
}

function Field({ label, id, children }: { label: string; id: string; children: ComponentChildren }) {
  return (
    <div class="field">
      <label for={id}>{label}</label>
      {children}
    </div>
  );
}
