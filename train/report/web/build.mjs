// Bundles the page into ../page: one script and one style, with the licences of what is bundled.
import { copyFileSync, readFileSync, statSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const out = new URL("../page/", import.meta.url).pathname;
const result = await build({
  entryPoints: { page: "src/main.ts" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "iife",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
  metafile: true,
});
copyFileSync("src/page.html", `${out}page.html`);

const packages = new Set(
  Object.keys(result.metafile.inputs)
    .map((path) => /^node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(path)?.[1])
    .filter(Boolean),
);
const licenses = [...packages].sort().map((name) => {
  const { version, license } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  return `${name} ${version} (${license})\n\n${readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim()}\n`;
});
writeFileSync(`${out}LICENSES.txt`, `page.js and page.css contain:\n\n${licenses.join("\n---\n\n")}`);
for (const file of ["page.js", "page.css"]) console.log(file, statSync(out + file).size);
