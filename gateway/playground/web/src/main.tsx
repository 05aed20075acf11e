// The playground: what it is for stands in ../README.md. It runs in the browser and talks to its own gateway alone.

import { render } from "preact";
import { App } from "./app";

const root = document.getElementById("app");
if (root !== null) {
  root.replaceChildren();
  render(<App />, root);
}
