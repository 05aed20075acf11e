// Earlier chats, kept in this browser only.

import type { Turn } from "./settings";

export interface Chat {
  id: string;
  turns: Turn[];
}

const CHATS = "outrider.chats";
const MOST_CHATS = 30;
const TITLE_LENGTH = 48;

/** The newest first; [] where the browser keeps nothing. */
export function readChats(): Chat[] {
  try {
    return JSON.parse(localStorage.getItem(CHATS) ?? "[]") as Chat[];
  } catch {
    return [];
  }
}

/** Puts a chat in front of the others; the oldest make room. A full or forbidden store keeps less, or nothing. */
export function keepChat(chat: Chat): Chat[] {
  const others = readChats().filter((one) => one.id !== chat.id);
  for (let number = MOST_CHATS; number > 0; number = Math.floor(number / 2)) {
    try {
      const kept = [chat, ...others].slice(0, number);
      localStorage.setItem(CHATS, JSON.stringify(kept));
      return kept;
    } catch {
      continue;
    }
  }
  return [];
}

export function forgetChats(): void {
  localStorage.removeItem(CHATS);
}

export function titleOf(chat: Chat): string {
  const first = chat.turns.find((turn) => turn.role === "user")?.content.trim() ?? "";
  return first.length > TITLE_LENGTH ? `${first.slice(0, TITLE_LENGTH)}…` : first;
}
