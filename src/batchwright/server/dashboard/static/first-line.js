// Finds out what an input file holds from its beginning: requests, prompts, or rows of a table.

const ENDPOINTS = [
  "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank", "/v1/score", "/classify",
];
const MOST_READ = 4 * 2 ** 20; // bytes; the service's own limit for a line is less

/**
 * What a file holds. `kind`: "requests" with their `endpoint`; "table" with its `columns`, null if they are not known
 * here; or "prompts". Raises an Error that names the line and what is wrong with it.
 */
export async function inspect(file) {
  const suffix = /\.([a-z]+)$/.exec(file.name.toLowerCase())?.[1];
  if (!file.size) throw new Error("It is empty.");
  if (suffix === "parquet") return { kind: "table", columns: null };
  if (suffix === "txt") return { kind: "prompts", columns: null };
  const text = (await file.slice(0, MOST_READ).text()).replace(/^\ufeff/, "");
  if (suffix === "csv" || suffix === "tsv") return { kind: "table", columns: header(text, suffix === "csv" ? "," : "\t") };
  const [first, where] = suffix === "json" ? [element(text), "Its first element"] : firstLine(text);
  if (first === null || typeof first !== "object") return { kind: "prompts", columns: null };
  const prompts = "prompt" in first || "messages" in first;
  if ("body" in first || ENDPOINTS.includes(first.url) || ("method" in first && !prompts)) {
    return { kind: "requests", endpoint: endpointOf(first, where), array: suffix === "json" };
  }
  const kind = prompts ? "prompts" : "table";
  return { kind, columns: Object.keys(first) };
}

function firstLine(text) {
  const lines = text.split("\n");
  const index = lines.findIndex((line) => line.trim() !== "");
  if (index < 0) throw new Error("Its beginning is blank.");
  try {
    return [JSON.parse(lines[index]), `Line ${index + 1}`];
  } catch {
    throw new Error(`Line ${index + 1}: must be a JSON object such as {"custom_id": "a", "method": "POST", "url": …} or {"prompt": …}`);
  }
}

/** The first element of a JSON array; {} if it does not end in what was read. */
function element(text) {
  try {
    return JSON.parse(text)[0] ?? {};
  } catch {
    return {};
  }
}

function endpointOf(first, where) {
  if (!ENDPOINTS.includes(first.url)) {
    const found = first.url === undefined ? "there is none" : `it is ${JSON.stringify(first.url)}`;
    throw new Error(`${where}: “url” must be one of ${ENDPOINTS.join(", ")}; ${found}`);
  }
  return first.url;
}

/** The cells of the first line of a CSV file, in which quotes are doubled within quotes. */
function header(text, delimiter) {
  const cells = [""];
  let quoted = false;
  for (let at = 0; at < text.length; at += 1) {
    const sign = text[at];
    if (quoted && sign === '"' && text[at + 1] === '"') {
      cells[cells.length - 1] += sign;
      at += 1;
    } else if (sign === '"') quoted = !quoted;
    else if (!quoted && (sign === "\n" || sign === "\r")) break;
    else if (!quoted && sign === delimiter) cells.push("");
    else cells[cells.length - 1] += sign;
  }
  return cells;
}
