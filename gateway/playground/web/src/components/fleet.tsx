// A picture of the fleet: the gateway in the middle, drafters on one side, verifiers on the other.

import type { ComponentChildren } from "preact";
import type { FleetState } from "../use-gateway";
import type { Drafter, Learning, Method, Verifier } from "../wire";

export function FleetPicture({ fleet, drafting }: { fleet: FleetState; drafting: string }) {
  const { view, isStale } = fleet;
  return (
    <section class="fleet card" aria-label="Fleet">
      <div class="row">
        <h2>Fleet</h2>
        {isStale && (
          <p class="trouble" role="status">
            The gateway does not answer; this is its last known state.
          </p>
        )}
      </div>
      {view === null ? (
        <p class="quiet">No data yet.</p>
      ) : (
        <div class="picture">
          <div class="side drafters">
            <h3>Drafters</h3>
            <ul>
            {view.drafters.map((drafter) => (
              <DrafterNode key={drafter.address} drafter={drafter} isDrafting={drafting === drafter.address} />
            ))}
            {view.drafters.length === 0 && <li class="node quiet">{noDrafters(view.verifiers)}</li>}
            </ul>
          </div>
          <div class="node gateway">
            <h3>Gateway</h3>
            <p>
              <b>{view.gateway.num_running}</b> {view.gateway.num_running === 1 ? "session" : "sessions"}
            </p>
          </div>
          <div class="side verifiers">
            <h3>Verifiers</h3>
            <ul>
            {view.verifiers.map((verifier) => (
              <VerifierNode key={verifier.address} verifier={verifier} />
            ))}
            {view.verifiers.length === 0 && <li class="node quiet">None known.</li>}
            </ul>
          </div>
        </div>
      )}
    </section>
  );
}

function noDrafters(verifiers: Verifier[]): string {
  const draftsItself = verifiers.some((verifier) => verifier.healthy && verifier.methods.length > 0);
  return draftsItself ? "None: the verifier drafts in its own process." : "None: decoding without drafts.";
}

function DrafterNode({ drafter, isDrafting }: { drafter: Drafter; isDrafting: boolean }) {
  const state = !drafter.healthy ? "gone" : isDrafting ? "drafting" : "serving";
  return (
    <Node member={drafter} state={state}>
      <Meter label="sessions" value={drafter.num_sessions} of={drafter.max_sessions} />
      <Methods methods={drafter.methods} />
    </Node>
  );
}

function Methods({ methods }: { methods: Method[] }) {
  if (methods.length === 0) return null;
  return (
    <p class="methods">
      {methods.map((method) => (
        <span key={method.name} class="chip">
          {method.name}
          {method.version > 1 && ` v${method.version}`}
        </span>
      ))}
    </p>
  );
}

function VerifierNode({ verifier }: { verifier: Verifier }) {
  const state = !verifier.healthy ? "gone" : verifier.num_sessions > 0 ? "verifying" : "serving";
  return (
    <Node member={verifier} state={state}>
      <Meter label="sessions" value={verifier.num_sessions} of={verifier.max_sessions} />
      <Meter label="KV blocks" value={verifier.num_blocks - verifier.num_free_blocks} of={verifier.num_blocks} />
      {verifier.model && (
        <p class="quiet">
          {verifier.model}, {verifier.dtype} on {verifier.device}
          {verifier.num_waiting > 0 && `, ${verifier.num_waiting} waiting`}
        </p>
      )}
      <Methods methods={verifier.methods} />
      {verifier.learning && <Learned learning={verifier.learning} />}
    </Node>
  );
}

function Learned({ learning }: { learning: Learning }) {
  const heads = `${learning.num_taken} heads taken, ${learning.num_refused} refused, ${learning.num_rolled_back} rolled back`;
  const change = `${learning.tokens_before.toFixed(2)} → ${learning.tokens_after.toFixed(2)} tokens a round expected`;
  return (
    <p class="quiet" title={learning.refusal && `Last refused: ${learning.refusal}`}>
      Learned from {learning.num_tokens.toLocaleString("en")} tokens: {heads}
      {learning.tokens_after > 0 && `, ${change}`}
    </p>
  );
}

interface NodeProps {
  member: { address: string; healthy: boolean };
  state: string;
  children: ComponentChildren;
}

function Node({ member, state, children }: NodeProps) {
  const isBusy = state === "drafting" || state === "verifying";
  return (
    <li class={`node${member.healthy ? "" : " gone"}${isBusy ? " busy" : ""}`}>
      <p class="row">
        <span class="mono">{member.address}</span>
        <span class="state-word">
          <svg viewBox="0 0 10 10" width="10" height="10" aria-hidden="true">
            {member.healthy ? <circle cx="5" cy="5" r="4" /> : <path d="M1.5 1.5l7 7m0-7l-7 7" />}
          </svg>{" "}
          {state}
        </span>
      </p>
      {member.healthy && children}
    </li>
  );
}

function Meter({ label, value, of }: { label: string; value: number; of: number }) {
  const share = of > 0 ? Math.min(1, value / of) : 0;
  return (
    <p class="meter">
      <span>
        {value} / {of} {label}
      </span>
      <svg viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">
        <rect class="ground" width="100" height="4" />
        <rect width={100 * share} height="4" />
      </svg>
    </p>
  );
}
