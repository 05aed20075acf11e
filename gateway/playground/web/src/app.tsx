// The whole page: request, answers, fleet. Not here: how the parts are drawn (components/).

import { useEffect, useState } from "preact/hooks";
import { Answer } from "./components/answer";
import { Charts } from "./components/charts";
import { Composer } from "./components/composer";
import { FleetPicture } from "./components/fleet";
import { Header } from "./components/header";
import { SettingsForm } from "./components/settings-form";
import { DEFAULTS, methodToShow, type Settings } from "./settings";
import { useFleet, useGateway } from "./use-gateway";
import { useRuns } from "./use-runs";

export function App() {
  const gateway = useGateway();
  const [settings, setSettings] = useState<Settings>(DEFAULTS);
  const runs = useRuns(gateway.api, settings);
  const fleet = useFleet(gateway, runs.mark);
  const change = (part: Partial<Settings>) => setSettings((before) => ({ ...before, ...part }));
  const refusedField = runs.main?.failure?.param ?? null;

  useEffect(() => {
    document.title = gateway.model === null ? "Outrider playground" : `${gateway.model.id} · Outrider playground`;
    if (gateway.model !== null) change({ method: methodToShow(gateway.model.draft_methods) });
  }, [gateway.model]);

  const send = () => {
    if (settings.kind === "chat") change({ message: "" });
    void runs.start();
  };
  return (
    <>
      <Header gateway={gateway} version={fleet.view?.version ?? ""} />
      <main>
        <Composer settings={settings} change={change} runs={runs} send={send} />
        <SettingsForm settings={settings} change={change} model={gateway.model} refusedField={refusedField} />
        <Answer runs={runs} />
        <Charts main={runs.main} plain={runs.plain} />
        <FleetPicture fleet={fleet} drafting={runs.drafting} />
      </main>
      <footer>
        Everything on this page comes from the gateway that served it. <a href="playground/licenses.txt">Licences</a>
      </footer>
    </>
  );
}
