// A chat's answer as rendered Markdown. What a model writes is not trusted: HTML in it is shown as text, and of what is
// rendered only text, links and tables are left.

import DOMPurify from "dompurify";
import { Marked } from "marked";
import { useMemo } from "preact/hooks";

const ALLOWED_TAGS =
  "a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i li ol p pre strong sub sup table tbody td th thead tr ul".split(" ");

const marked = new Marked({ gfm: true, renderer: { html: ({ text }) => escaped(text) } });

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.setAttribute("target", "_blank");
  node.setAttribute("rel", "noopener noreferrer");
});

export function Markdown({ text }: { text: string }) {
  const html = useMemo(() => {
    const rendered = marked.parse(text, { async: false });
    return DOMPurify.sanitize(rendered, { ALLOWED_TAGS, ALLOWED_ATTR: ["href", "start", "align"] });
  }, [text]);
  return <div class="markdown" dangerouslySetInnerHTML={{ __html: html }} />;
}

function escaped(text: string): string {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}
