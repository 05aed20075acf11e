// Differences between two fleet states: members gone and back.

import type { Fleet } from "./wire";

export interface Change {
  text: string;
  gone: boolean;
}

interface Member {
  address: string;
  healthy: boolean;
}

/** The new state, plus members no longer listed (a name now resolves to fewer addresses), marked as gone. */
export function withDeparted(before: Fleet | null, now: Fleet): Fleet {
  if (before === null) return now;
  return {
    ...now,
    verifiers: keep(before.verifiers, now.verifiers),
    drafters: keep(before.drafters, now.drafters),
  };
}

function keep<M extends Member & { num_sessions: number }>(before: M[], now: M[]): M[] {
  const listed = new Set(now.map((member) => member.address));
  const departed = before.filter((member) => !listed.has(member.address));
  return [...now, ...departed.map((member) => ({ ...member, healthy: false, num_sessions: 0 }))];
}

export function changes(before: Fleet | null, now: Fleet): Change[] {
  if (before === null) return [];
  return [
    ...changesOf("Verifier", before.verifiers, now.verifiers),
    ...changesOf("Drafter", before.drafters, now.drafters),
  ];
}

function changesOf(service: string, before: Member[], now: Member[]): Change[] {
  const wasHealthy = new Map(before.map((member) => [member.address, member.healthy]));
  return now
    .filter((member) => (wasHealthy.get(member.address) ?? false) !== member.healthy)
    .map((member) => ({
      text: `${service} ${member.address} is ${member.healthy ? "back" : "gone"}`,
      gone: !member.healthy,
    }));
}
