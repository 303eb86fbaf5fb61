// Does what lines of JSON on stdin say with `headrace.js` of a folder, and answers each with a line.
"use strict";

const readline = require("node:readline");
const { Reader, hashOfRow, tableSeed } = require(`${process.argv[2]}/headrace.js`);

let reader;
const orders = {
  async connect(address, options) {
    reader = await Reader.connect(address, options);
    return [...reader.tables.keys()].sort();
  },
  async get(fqn, ids) {
    const { weights, dim, isPresent } = await reader.get(fqn, ids.map(BigInt));
    return { weights: [...weights], dim, isPresent };
  },
  hashes: (fqn, ids) => ids.map((id) => String(hashOfRow(tableSeed(fqn), BigInt(id)))),
  close: () => reader.close(),
};

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [name, ...given] = JSON.parse(line);
    let answer;
    try {
      answer = { result: (await orders[name](...given)) ?? null };
    } catch (error) {
      answer = { error: error.message };
    }
    console.log(JSON.stringify(answer));
  }
}

main();
