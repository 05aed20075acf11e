import { useEffect } from "preact/hooks";
import type { Settings } from "../settings";
import { areToolsJson, EXAMPLE_TOOLS, EXAMPLES, QUESTIONS } from "../settings";
import type { Runs } from "../use-runs";

interface Props {
  settings: Settings;
  change: (part: Partial<Settings>) => void;
  runs: Runs;
  send: () => void;
}

export function Composer({ settings, change, runs, send }: Props) {
  const isChat = settings.kind === "chat";
  const text = isChat ? settings.message : settings.prompt;
  const set = (value: string) => change(isChat ? { message: value } : { prompt: value });
  const areToolsRead = !isChat || areToolsJson(settings);
  const canSend = text.trim() !== "" && !runs.isRunning && areToolsRead;
  const submit = (event: Event) => {
    event.preventDefault();
    if (canSend) send();
  };
  useEffect(() => {
    const onKeyDown = (event: KeyboardEvent) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
    };
    document.addEventListener("keydown", onKeyDown);
    return () => document.removeEventListener("keydown", onKeyDown);
  });
  return (
    <form class="composer card" aria-label="Request" onSubmit={submit}>
      <div class="row">
        <KindChoice kind={settings.kind} choose={(kind) => { runs.clear(); change({ kind }); }} />
        <p class="examples">
          Try{" "}
          {(isChat ? QUESTIONS : EXAMPLES).map((example) => (
            <button key={example.name} type="button" class="link" onClick={() => set(example.text)}>
              {example.name}
            </button>
          ))}
        </p>
        {isChat && (
          <button type="button" class="link" onClick={runs.clear} disabled={runs.history.length === 0}>
            New chat
          </button>
        )}
      </div>
      {isChat && (
        <input
          class="system"
          aria-label="System message"
          placeholder="System message (optional)"
          value={settings.system}
          onInput={(event) => change({ system: event.currentTarget.value })}
        />
      )}
      <textarea
        aria-label={isChat ? "Message" : "Prompt"}
        placeholder={isChat ? "What is the capital of France?" : "Text to continue"}
        rows={isChat ? 3 : 5}
        spellcheck={false}
        value={text}
        onInput={(event) => set(event.currentTarget.value)}
      />
      {isChat && (
        <details class="tools">
          <summary>Tools</summary>
          <textarea
            aria-label="Tools"
            placeholder="OpenAI's list of tools, as JSON"
            rows={4}
            spellcheck={false}
            value={settings.tools}
            aria-invalid={!areToolsRead}
            onInput={(event) => change({ tools: event.currentTarget.value })}
          />
          <div class="row">
            <button type="button" class="link" onClick={() => change({ tools: EXAMPLE_TOOLS })}>
              An example
            </button>
            <label class="check">
              <input
                type="checkbox"
                checked={settings.mustCall}
                onChange={(event) => change({ mustCall: event.currentTarget.checked })}
              />
              The model must call one
            </label>
            {!areToolsRead && <p role="alert">The tools are not JSON.</p>}
          </div>
        </details>
      )}
      <div class="row actions">
        <button type="submit" class="primary" disabled={!canSend}>
          {isChat ? "Send" : "Run"} <kbd>Ctrl ↵</kbd>
        </button>
        <button type="button" onClick={runs.stop} disabled={!runs.isRunning}>
          Stop
        </button>
        <label class="switch">
          <input
            type="checkbox"
            role="switch"
            checked={settings.compare}
            onChange={(event) => change({ compare: event.currentTarget.checked })}
          />
          Compare with speculation off
        </label>
      </div>
    </form>
  );
}

function KindChoice({ kind, choose }: { kind: Settings["kind"]; choose: (kind: Settings["kind"]) => void }) {
  const names = { prompt: "Prompt", chat: "Chat" } as const;
  return (
    <fieldset class="segmented">
      <legend class="unseen">Kind of request</legend>
      {(["prompt", "chat"] as const).map((one) => (
        <label key={one}>
          <input type="radio" name="kind" value={one} checked={kind === one} onChange={() => choose(one)} />
          <span>{names[one]}</span>
        </label>
      ))}
    </fieldset>
  );
}
