// Finds the endpoint of an input file in its first line.

const ENDPOINTS = ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"];
const MOST_READ = 4 * 2 ** 20; // bytes; the service's own limit for a line is less

/** The endpoint that the first line asks for. Raises an Error that names the line and what is wrong with it. */
export async function endpointOf(file) {
  const lines = (await file.slice(0, MOST_READ).text()).replace(/^\ufeff/, "").split("\n");
  const index = lines.findIndex((line) => line.trim() !== "");
  if (index < 0) throw new Error(file.size ? "Its beginning is blank." : "It is empty.");
  const where = `Line ${index + 1}`;
  let first;
  try {
    first = JSON.parse(lines[index]);
  } catch {
    throw new Error(`${where}: must be a JSON object such as {"custom_id": "a", "method": "POST", "url": …}`);
  }
  if (!ENDPOINTS.includes(first?.url)) {
    const found = first?.url === undefined ? "there is none" : `it is ${JSON.stringify(first.url)}`;
    throw new Error(`${where}: “url” must be one of ${ENDPOINTS.join(", ")}; ${found}`);
  }
  return first.url;
}
