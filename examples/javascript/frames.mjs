// Frames of float32 tensors by `none` and `int8`, from docs/wire-format.md and docs/byte-layouts.md alone.

const UINT8 = 0, BFLOAT16 = 2, FLOAT32 = 3;
const BLOCK = 256; // of int8
const MOST = 0x7c01; // the largest bfloat16 scale that times 127 is finite

const CRC = Uint32Array.from({ length: 256 }, (_, n) => {
  for (let bit = 0; bit < 8; bit++) n = n & 1 ? (n >>> 1) ^ 0xedb88320 : n >>> 1;
  return n;
});
const crc32 = (bytes) => ~bytes.reduce((crc, byte) => CRC[(crc ^ byte) & 255] ^ (crc >>> 8), -1) >>> 0;

function frame(codec, shape, parts) {
  const tables = 48 + 8 * (shape.length + parts.length);
  const header = 8 * Math.ceil((tables + codec.length) / 8);
  const bytes = Buffer.concat([Buffer.alloc(header), ...parts.map((part) => part.data)]);
  bytes.write('GRDW', 0, 'latin1');
  bytes.set([1, 0], 8); // version, flags
  bytes.writeUInt16LE(header, 10);
  bytes.set([FLOAT32, shape.length, parts.length, 0], 12);
  bytes.writeUInt16LE(codec.length, 16);
  bytes.writeBigUInt64LE(BigInt(bytes.length), 40);
  const entries = parts.map(({ dtype, data }) => (BigInt(dtype) << 56n) | BigInt(data.length));
  [...shape.map(BigInt), ...entries].forEach((entry, i) => bytes.writeBigUInt64LE(entry, 48 + 8 * i));
  bytes.write(codec, tables, 'latin1');
  bytes.writeUInt32LE(crc32(bytes.subarray(8)), 4);
  return bytes;
}

// Typed arrays have the byte order of the machine, which is little-endian wherever node runs but for s390x.
const bytesOf = (array) => Buffer.from(array.buffer, array.byteOffset, array.byteLength);
const upper = (half) => new Float32Array(Uint32Array.of(half << 16).buffer)[0]; // a bfloat16
const f32 = Math.fround;
const toEven = (x) => f32(f32(x + 12582912) - 12582912); // the nearest whole number of a small float32

export const encode = {
  none: (values, shape) => frame('none', shape, [{ dtype: FLOAT32, data: bytesOf(Float32Array.from(values)) }]),

  int8(values, shape) {
    const scales = new Uint16Array(Math.ceil(values.length / BLOCK));
    const codes = new Uint8Array(values.length);
    for (let block = 0; block < scales.length; block++) {
      const start = block * BLOCK, part = Float32Array.from(values.slice(start, start + BLOCK));
      const largest = part.reduce((most, x) => Math.max(most, Math.abs(x)), 0);
      if (largest >= 2 ** -100) {
        const [bits] = new Uint32Array(Float32Array.of(largest * f32(1 / 127)).buffer);
        scales[block] = Math.min(MOST, (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16);
      }
      const scale = upper(scales[block]), inverse = scale ? f32(1 / scale) : 0;
      part.forEach((x, i) => (codes[start + i] = Math.max(-127, Math.min(127, toEven(f32(x * inverse)))) + 127));
    }
    return frame('int8', shape, [{ dtype: BFLOAT16, data: bytesOf(scales) }, { dtype: UINT8, data: Buffer.from(codes) }]);
  },
};

export function decode(bytes) {
  if (bytes.toString('latin1', 0, 4) !== 'GRDW' || bytes[8] !== 1) throw new Error('not a frame of version 1');
  if (bytes.readUInt32LE(4) !== crc32(bytes.subarray(8))) throw new Error('the checksum does not fit');
  if (bytes[9]) throw new Error('the tensor holds NaN or Inf');
  const header = bytes.readUInt16LE(10), tables = 48 + 8 * (bytes[13] + bytes[14]);
  const codec = bytes.toString('latin1', tables, tables + bytes.readUInt16LE(16));
  const body = Uint8Array.from(bytes.subarray(header)); // a copy, and so aligned
  if (codec === 'none' && bytes[12] === FLOAT32) return new Float32Array(body.buffer);
  if (codec !== 'int8') throw new Error(`this client reads none of float32 and int8; got ${codec}`);
  const codes = body.subarray(Number(bytes.readBigUInt64LE(tables - 16) & 0xffffffffffffn)); // behind the scales
  const scales = new Uint16Array(body.buffer, 0, body.length - codes.length >> 1);
  return Float32Array.from(codes, (code, i) => (code - 127) * upper(scales[Math.floor(i / BLOCK)]));
}
