// A worker of gradwire's coordinator, without gradwire: it reads parameters, computes gradients, pushes them.
//
//   node client.mjs [ADDRESS] [coordinator.proto]      GRADWIRE_TOKEN, if the server wants one
//
// Its problem is to bring w to a sine: the loss is the sum of (w - target)^2 / 2, its gradient w - target.

import { fileURLToPath } from 'node:url';
import { promisify } from 'node:util';
import grpc from '@grpc/grpc-js';
import { loadSync } from '@grpc/proto-loader';
import { decode, encode } from './frames.mjs';

const here = new URL('../../src/gradwire/coordinator/protocol/coordinator.proto', import.meta.url);
const [address = '127.0.0.1:7070', proto = fileURLToPath(here)] = process.argv.slice(2);
// Numbers of 64 bits as strings: sessions and copies do not fit into a number of JavaScript.
const definition = loadSync(proto, { keepCase: true, longs: String, enums: String, defaults: true });
const { Coordinator } = grpc.loadPackageDefinition(definition).gradwire.coordinator.v1;
const client = new Coordinator(address, grpc.credentials.createInsecure());
const metadata = new grpc.Metadata();
if (process.env.GRADWIRE_TOKEN) metadata.set('authorization', `Bearer ${process.env.GRADWIRE_TOKEN}`);

const WORKER = 'javascript', SIZE = 1000, STEP = 0.5;
const target = Float32Array.from({ length: SIZE }, (_, i) => Math.sin(i / 50));

// Messages of a header and data, in parts of 1 MiB.
function send(stream, header, data) {
  for (let at = 0; at < data.length || at === 0; at += 1 << 20)
    stream.write({ ...(at === 0 && { header }), data: data.subarray(at, at + (1 << 20)) });
}

// Set the parameters, if the server has none yet.
function begin(w) {
  return new Promise((resolve, reject) => {
    const stream = client.SetModel(metadata, (error, reply) => (error ? reject(error) : resolve(reply)));
    const data = encode.none(w, [w.length]);
    send(stream, { structure: 'dict', only_if_empty: true, entries: [{ name: 'w', length: data.length }] }, data);
    stream.end();
  });
}

// What the server has: exact, or with a codec and the number of the copy that we have, what has changed since.
async function pull(request) {
  let header, chunks = [];
  for await (const part of client.Pull({ reader: WORKER, ...request }, metadata)) {
    header = part.header ?? header;
    chunks.push(part.data);
  }
  return { header, values: decode(Buffer.concat(chunks)) }; // there is one entry, w
}

const describe = promisify(client.Describe.bind(client));
await begin(new Float32Array(SIZE));
const { last_session } = await describe({ worker: WORKER }, metadata);
const session = String(BigInt(last_session) + 1n);
const pushes = client.Push(metadata), replies = pushes[Symbol.asyncIterator]();

let copy = '0', w;
for (let sequence = 1; sequence <= 20; sequence++) {
  const { header, values } = await pull({ codec: 'int8', copy });
  w = header.changes ? w.map((x, i) => x + values[i]) : values; // in float32, as the server does it
  copy = header.copy;
  const gradient = w.map((x, i) => x - target[i]);
  const codec = sequence % 2 ? 'none' : 'int8';
  const data = encode[codec](gradient.map((g) => STEP * g), [SIZE]);
  const entries = [{ name: 'w', length: data.length }];
  send(pushes, { worker: WORKER, session, sequence, version: header.version, entries }, data);
  const { value: reply = { refusal: 'no answer' } } = await replies.next();
  if (reply.refusal !== 'NONE') throw new Error(`${reply.refusal}: ${reply.message}`);
  const loss = gradient.reduce((sum, g) => sum + (g * g) / 2, 0);
  console.log(`loss ${loss.toExponential(3)} at version ${header.version}, ${data.length} bytes pushed as ${codec}`);
}
pushes.end();

const { header, values } = await pull({}); // exact
console.log(`version ${header.version}, w = ${values.slice(0, 5).join(' ')} ...`);
client.close();
