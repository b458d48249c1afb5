// The routes, as the server's own description tells them.

import { ask, create } from "./calls.js";

const description = await ask("/api/openapi.json");
const schemas = description.components.schemas;

// A schema as one would write it down, in a few levels.
function sketch(schema, depth = 0) {
  if (schema.$ref) return sketch(schemas[schema.$ref.split("/").at(-1)], depth);
  if (schema.anyOf) return [...new Set(schema.anyOf.filter((one) => one.type !== "null").map((one) => sketch(one, depth)))].join(" | ");
  if (schema.prefixItems) return `[${schema.prefixItems.map((one) => sketch(one, depth)).join(", ")}]`;
  if (schema.type === "array") return `[${sketch(schema.items, depth)}, …]`;
  if (schema.properties) {
    const pad = "  ".repeat(depth + 1);
    const required = schema.required ?? [];
    const lines = Object.entries(schema.properties).map(
      ([name, one]) => `${pad}"${name}": ${sketch(one, depth + 1)}${required.includes(name) ? "" : "   (optional)"}`);
    return `{\n${lines.join(",\n")}\n${"  ".repeat(depth)}}`;
  }
  if (schema.additionalProperties) return `{"…": ${sketch(schema.additionalProperties, depth)}}`;
  return schema.format === "binary" ? "the bytes of a file" : schema.type ?? "anything";
}

for (const [path, methods] of Object.entries(description.paths)) {
  for (const [method, route] of Object.entries(methods)) {
    const query = (route.parameters ?? []).map((one) => one.name).join("&");
    const parts = [
      create("h2", {}, create("code", { textContent: `${method.toUpperCase()} ${path}${query ? `?${query}` : ""}` })),
      create("p", { textContent: route.description ?? "" }),
    ];
    const body = Object.values(route.requestBody?.content ?? {})[0]?.schema;
    const answer = route.responses["200"]?.content?.["application/json"]?.schema;
    if (body) parts.push(create("pre", {}, create("code", { textContent: sketch(body) })));
    if (answer) parts.push(create("pre", {}, create("code", { textContent: `→ ${sketch(answer)}` })));
    document.getElementById("routes").append(create("section", { className: "route" }, ...parts));
  }
}
