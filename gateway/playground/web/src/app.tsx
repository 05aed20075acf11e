// The whole page: the conversation with its composer, settings, fleet. Not here: how the parts are drawn (components/).

import { useEffect, useState } from "preact/hooks";
import { Answer } from "./components/answer";
import { Charts } from "./components/charts";
import { Composer } from "./components/composer";
import { FleetPicture } from "./components/fleet";
import { Header } from "./components/header";
import { SettingsForm } from "./components/settings-form";
import { DEFAULTS, type Settings } from "./settings";
import { useFleet, useGateway } from "./use-gateway";
import { useRuns } from "./use-runs";

const MOST_COMPLETION_TOKENS = 1024;

export function App() {
  const gateway = useGateway();
  const [settings, setSettings] = useState<Settings>(DEFAULTS);
  const model = gateway.models.find((one) => one.id === settings.model) ?? gateway.models[0] ?? null;
  const runs = useRuns(gateway.api, settings);
  const fleet = useFleet(gateway, runs.mark);
  const change = (part: Partial<Settings>) => setSettings((before) => ({ ...before, ...part }));
  const refusedField = runs.main?.failure?.param ?? null;

  useEffect(() => {
    document.title = model === null ? "Outrider playground" : `${model.id} · Outrider playground`;
    if (model !== null) {
      const completionTokens = Math.min(MOST_COMPLETION_TOKENS, Math.floor(model.max_model_len / 2));
      change({ kind: model.chats ? "chat" : "prompt", completionTokens });
    }
  }, [model?.id]);

  const send = () => {
    if (settings.kind === "chat") change({ message: "" });
    void runs.start();
  };
  const choose = (kind: Settings["kind"]) => {
    runs.clear();
    change({ kind });
  };
  return (
    <>
      <Header gateway={gateway} model={model} choose={(id) => change({ model: id })} version={fleet.view?.version ?? ""} />
      <main>
        <section class="talk card" aria-label="Conversation">
          <Answer runs={runs} settings={settings} change={change} secondsLeft={fleet.secondsLeft} />
          <Composer settings={settings} change={change} runs={runs} send={send} model={model} choose={choose} />
        </section>
        <SettingsForm settings={settings} change={change} model={model} refusedField={refusedField} />
        {(runs.main?.numTokens ?? 0) > 0 && <Charts main={runs.main} plain={runs.plain} />}
        <FleetPicture fleet={fleet} drafting={runs.drafting} />
      </main>
      <footer>
        Everything on this page comes from the gateway that served it. <a href="playground/licenses.txt">Licences</a>
      </footer>
    </>
  );
}
