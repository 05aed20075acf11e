import type { Settings } from "../settings";
import { EXAMPLES } from "../settings";
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
  const submit = (event: Event) => {
    event.preventDefault();
    if (text.trim() && !runs.isRunning) send();
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
  };
  return (
    <form class="composer card" aria-label="Request" onSubmit={submit} onKeyDown={onKeyDown}>
      <div class="row">
        <KindChoice kind={settings.kind} choose={(kind) => { runs.clear(); change({ kind }); }} />
        {isChat ? (
          <button type="button" class="link" onClick={runs.clear} disabled={runs.history.length === 0}>
            New chat
          </button>
        ) : (
          <p class="examples">
            Try{" "}
            {EXAMPLES.map((example) => (
              <button key={example.name} type="button" class="link" onClick={() => change({ prompt: example.text })}>
                {example.name}
              </button>
            ))}
          </p>
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
        placeholder={isChat ? "Say something" : "Text to go on from"}
        rows={isChat ? 3 : 5}
        spellcheck={false}
        value={text}
        onInput={(event) => set(event.currentTarget.value)}
      />
      <div class="row actions">
        <button type="submit" class="primary" disabled={!text.trim() || runs.isRunning}>
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
