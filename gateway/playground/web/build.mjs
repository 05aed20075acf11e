// Builds src/ into ../static, which is committed: installing the gateway needs no Node.js.
// Also writes a hash of all sources, which tests/gateway/playground/test_playground.py checks.
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { basename, join } from "node:path";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const OUT = "../static";
const FONTS = ["ibm-plex-sans-latin-400-normal", "ibm-plex-sans-latin-600-normal", "ibm-plex-mono-latin-400-normal"];
// The page at /docs, which FastAPI would have the browser load from another host; a sixth of the size when packed.
const SWAGGER = ["swagger-ui-bundle.js", "swagger-ui.css"];
const LICENSES = ["preact", "marked", "dompurify", "swagger-ui-dist", "@fontsource/ibm-plex-sans", "@fontsource/ibm-plex-mono"];

rmSync(OUT, { recursive: true, force: true });
mkdirSync(OUT, { recursive: true });

const result = await build({
  entryPoints: ["src/main.tsx", "src/styles.css"],
  outdir: OUT,
  entryNames: "[name]-[hash]",
  assetNames: "[name]-[hash]",
  loader: { ".woff2": "file" },
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  metafile: true,
});

const built = Object.entries(result.metafile.outputs);
const nameOf = (entry) => basename(built.find(([, output]) => output.entryPoint === entry)[0]);
const fontOf = (font) => basename(built.find(([name]) => basename(name).startsWith(font))[0]);
const page = readFileSync("src/index.html", "utf8")
  .replace("{{script}}", nameOf("src/main.tsx"))
  .replace("{{style}}", nameOf("src/styles.css"))
  .replace(/{{font:(.+?)}}/g, (_, font) => fontOf(font));
writeFileSync(join(OUT, "index.html"), page);
copyFileSync("src/favicon.svg", join(OUT, "favicon.svg"));
for (const name of SWAGGER) {
  writeFileSync(join(OUT, `${name}.gz`), gzipSync(readFileSync(`node_modules/swagger-ui-dist/${name}`), { level: 9 }));
}

const licenses = LICENSES.map((name) => `${name}\n\n${readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim()}\n`);
writeFileSync(join(OUT, "licenses.txt"), licenses.join(`\n${"-".repeat(80)}\n\n`));
writeFileSync(join(OUT, "sources.sha256"), `${sourcesHash()}\n`);
if (FONTS.some((font) => !fontOf(font))) throw new Error("a font is missing");

/** Of each file its path, its length and its bytes, in the order of the paths. */
function sourcesHash() {
  const files = ["build.mjs", "package-lock.json", "package.json", "tsconfig.json"];
  for (const entry of readdirSync("src", { recursive: true, withFileTypes: true })) {
    if (entry.isFile()) files.push(join(entry.parentPath, entry.name).replaceAll("\\", "/"));
  }
  const hash = createHash("sha256");
  for (const file of files.sort()) {
    const bytes = readFileSync(file);
    hash.update(`${file}\0${bytes.length}\0`).update(bytes);
  }
  return hash.digest("hex");
}
