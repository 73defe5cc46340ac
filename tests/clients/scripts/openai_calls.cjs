// openai's client for Node: FOLDER URL MODEL PROMPT TOKENS WAY. FOLDER has node_modules.
const assert = require("node:assert");
const path = require("node:path");

const [folder, baseURL, model, prompt, tokens, way] = process.argv.slice(2);
const { default: OpenAI, NotFoundError } = require(path.join(folder, "node_modules", "openai"));
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const wanted = { model, max_tokens: Number(tokens), temperature: 0 };
const messages = [{ role: "user", content: prompt }];

const ways = {
  async completions() {
    const found = await client.completions.create({ prompt, ...wanted });
    assert.equal(found.usage.completion_tokens, Number(tokens));
    const { data } = await client.embeddings.create({ model, input: [prompt, "x"] });
    for (const { embedding } of data)
      assert.ok(Math.abs(embedding.reduce((sum, x) => sum + x * x, 0) - 1) < 1e-4);
    return found.choices[0].text;
  },
  async "completions, stream"() {
    let text = "";
    for await (const chunk of await client.completions.create({ prompt, stream: true, ...wanted }))
      text += chunk.choices[0].text;
    return text;
  },
  async chat() {
    const found = await client.chat.completions.create({ messages, ...wanted });
    assert.equal(found.choices[0].finish_reason, "length");
    await assert.rejects(
      client.chat.completions.create({ messages, ...wanted, model: "absent" }),
      (error) => error instanceof NotFoundError && error.code === "model_not_found",
    );
    return found.choices[0].message.content;
  },
  async "chat, stream"() {
    const stream = client.chat.completions.stream({ messages, ...wanted });
    let text = "";
    stream.on("content", (delta) => (text += delta));
    const final = await stream.finalChatCompletion();
    assert.equal(final.choices[0].message.content, text);
    return text;
  },
};
ways[way]().then(
  (answer) => console.log("ANSWER", JSON.stringify(answer)),
  (error) => {
    console.error(`Error: ${error.message}`);
    process.exit(1);
  },
);
