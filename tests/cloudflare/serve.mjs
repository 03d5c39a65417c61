// Serves worker.mjs on a free local port, prints its address, and stops when its standard input is closed.

import { fileURLToPath } from "node:url";
import { Miniflare } from "miniflare";

const [account, namespace, token] = process.argv.slice(2);
const miniflare = new Miniflare({
  modules: true,
  scriptPath: fileURLToPath(new URL("worker.mjs", import.meta.url)),
  compatibilityDate: "2026-01-01",
  kvNamespaces: ["KV"],
  bindings: { ACCOUNT: account, NAMESPACE: namespace, TOKEN: token },
  host: "127.0.0.1",
  port: 0,
});
console.log(`ready ${(await miniflare.ready).origin}`);
process.stdin.resume();
process.stdin.on("end", async () => {
  await miniflare.dispose();
  process.exit(0);
});
