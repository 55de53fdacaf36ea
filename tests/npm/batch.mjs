// One batch from upload to result with the official client for JavaScript: node batch.mjs BASE_URL INPUT_FILE
import fs from "node:fs";
import OpenAI from "openai";

const [baseURL, input] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });

const file = await client.files.create({ file: fs.createReadStream(input), purpose: "batch" });
let batch = await client.batches.create({
  input_file_id: file.id,
  endpoint: "/v1/chat/completions",
  completion_window: "24h",
  metadata: { from: "node" },
});
while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
  await new Promise((resolve) => setTimeout(resolve, 50));
  batch = await client.batches.retrieve(batch.id);
}
const listed = [];
for await (const each of client.batches.list({ limit: 1 })) listed.push(each.id);
const output = await (await client.files.content(batch.output_file_id)).text();

let refusal = null;
try {
  await client.batches.retrieve("batch_none");
} catch (error) {
  refusal = { kind: error.constructor.name, status: error.status, code: error.code };
}
console.log(JSON.stringify({ batch, listed, output, refusal }));
