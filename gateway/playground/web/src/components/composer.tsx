import { useEffect, useRef } from "preact/hooks";
import { titleOf } from "../chats";
import type { Settings } from "../settings";
import { areToolsJson, EXAMPLE_TOOLS } from "../settings";
import type { Runs } from "../use-runs";
import type { Model } from "../wire";

interface Props {
  settings: Settings;
  change: (part: Partial<Settings>) => void;
  runs: Runs;
  send: () => void;
  model: Model | null;
  choose: (kind: Settings["kind"]) => void;
}

export function Composer({ settings, change, runs, send, model, choose }: Props) {
  const isChat = settings.kind === "chat";
  const text = isChat ? settings.message : settings.prompt;
  const set = (value: string) => change(isChat ? { message: value } : { prompt: value });
  const areToolsRead = !isChat || areToolsJson(settings);
  const canSend = text.trim() !== "" && !runs.isRunning && areToolsRead;
  const field = useRef<HTMLTextAreaElement>(null);
  const submit = (event: Event) => {
    event.preventDefault();
    if (canSend) send();
  };
  const onEnter = (event: KeyboardEvent) => {
    // As in other chats; a prompt has lines of its own.
    if (isChat && event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  useEffect(() => {
    const onKeyDown = (event: KeyboardEvent) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && event.target !== field.current) submit(event);
      else if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !isChat) submit(event);
    };
    document.addEventListener("keydown", onKeyDown);
    return () => document.removeEventListener("keydown", onKeyDown);
  });
  const marks = settings.marks[settings.kind];
  return (
    <form class="composer" aria-label="Request" onSubmit={submit}>
      <div class="row">
        <KindChoice kind={settings.kind} choose={choose} canChat={model?.chats ?? true} />
        {isChat && <History runs={runs} />}
      </div>
      <textarea
        ref={field}
        aria-label={isChat ? "Message" : "Prompt"}
        placeholder={isChat ? "Write a message" : "Text to continue"}
        rows={isChat ? 2 : 4}
        spellcheck={false}
        value={text}
        onInput={(event) => set(event.currentTarget.value)}
        onKeyDown={onEnter}
      />
      <div class="row actions">
        {runs.isRunning ? (
          <button type="button" class="primary" onClick={runs.stop}>
            Stop
          </button>
        ) : (
          <button type="submit" class="primary" disabled={!canSend}>
            {isChat ? "Send" : "Run"} <kbd>{isChat ? "↵" : "Ctrl ↵"}</kbd>
          </button>
        )}
        <Switch label="Mark accepted tokens" isOn={marks} set={(on) => change({ marks: { ...settings.marks, [settings.kind]: on } })} />
        <Switch label="Compare with speculation off" isOn={settings.compare} set={(compare) => change({ compare })} />
      </div>
      {isChat && <Extras settings={settings} change={change} areToolsRead={areToolsRead} hasParser={Boolean(model?.tool_call_parser)} />}
    </form>
  );
}

function Switch({ label, isOn, set }: { label: string; isOn: boolean; set: (on: boolean) => void }) {
  return (
    <label class="switch">
      <input type="checkbox" role="switch" checked={isOn} onChange={(event) => set(event.currentTarget.checked)} />
      {label}
    </label>
  );
}

/** New chat, and the chats that this browser keeps. */
function History({ runs }: { runs: Runs }) {
  return (
    <p class="row">
      {runs.chats.length > 0 && (
        <select
          aria-label="Earlier chats"
          value=""
          onChange={(event) => {
            const { value } = event.currentTarget;
            const chat = runs.chats.find((one) => one.id === value);
            if (chat !== undefined) runs.open(chat);
            else if (value === "forget") runs.forget();
            event.currentTarget.value = "";
          }}
        >
          <option value="">Earlier chats</option>
          {runs.chats.map((chat) => (
            <option key={chat.id} value={chat.id}>
              {titleOf(chat)}
            </option>
          ))}
          <option value="forget">Forget all (kept in this browser only)</option>
        </select>
      )}
      <button type="button" class="link" onClick={runs.clear} disabled={runs.history.length === 0}>
        New chat
      </button>
    </p>
  );
}

interface ExtrasProps {
  settings: Settings;
  change: (part: Partial<Settings>) => void;
  areToolsRead: boolean;
  hasParser: boolean;
}

function Extras({ settings, change, areToolsRead, hasParser }: ExtrasProps) {
  return (
    <details class="tools">
      <summary>System message and tools</summary>
      <input
        class="system"
        aria-label="System message"
        placeholder="System message (optional)"
        value={settings.system}
        onInput={(event) => change({ system: event.currentTarget.value })}
      />
      <textarea
        aria-label="Tools"
        placeholder="OpenAI's list of tools, as JSON"
        rows={3}
        spellcheck={false}
        value={settings.tools}
        aria-invalid={!areToolsRead}
        onInput={(event) => change({ tools: event.currentTarget.value })}
      />
      <div class="row">
        {hasParser ? (
          <button type="button" class="link" onClick={() => change({ tools: EXAMPLE_TOOLS })}>
            An example
          </button>
        ) : (
          <span class="quiet">No parser reads this model's tool calls.</span>
        )}
        <label class="check">
          <input type="checkbox" checked={settings.mustCall} onChange={(event) => change({ mustCall: event.currentTarget.checked })} />
          The model must call one
        </label>
        {!areToolsRead && <p role="alert">The tools are not JSON.</p>}
      </div>
    </details>
  );
}

interface KindProps {
  kind: Settings["kind"];
  choose: (kind: Settings["kind"]) => void;
  /** Whether the model has a chat template. */
  canChat: boolean;
}

function KindChoice({ kind, choose, canChat }: KindProps) {
  const names = { chat: "Chat", prompt: "Completion" } as const;
  return (
    <fieldset class="segmented">
      <legend class="unseen">Kind of request</legend>
      {(["chat", "prompt"] as const).map((one) => (
        <label key={one}>
          <input
            type="radio"
            name="kind"
            value={one}
            checked={kind === one}
            disabled={one === "chat" && !canChat}
            onChange={() => choose(one)}
          />
          <span>{names[one]}</span>
        </label>
      ))}
    </fieldset>
  );
}
