// A tour in ten scenes. Each is a state of the page: settings, how many steps were made before, and what to look at.

export const LESSONS = [
  {
    title: "What data parallelism is",
    text: [
      "One network, several <em>workers</em>. Each holds a copy, takes its part of the <em>global batch</em>, and works out a gradient. The gradients are added up, and all take the same step.",
      "Everything here is computed as you watch: a small network learns to tell two spirals apart. Each colour is a worker, everywhere on this page; the pattern in its circle is the hash of its weights.",
    ],
    settings: { workers: 4, reduction: "ring" },
    tries: [{ label: "One worker alone", set: { workers: 1 } }, { label: "Eight workers", set: { workers: 8 } }, { label: "Make 200 steps", steps: 200 }],
  },
  {
    title: "Replicate, split, all-reduce, update",
    text: [
      "A step has four parts. The copies are equal. The batch is split, without padding. Gradients are <em>all-reduced</em>: everybody ends with the sum. The update is the same everywhere, so the copies stay equal: compare the hashes.",
      "It must be the gradient of the whole batch. Let one part be short and count all parts alike, the <em>mean of means</em>, and it is another gradient.",
    ],
    settings: { workers: 3, batch: 50, reduction: "ring" },
    look: "same",
    tries: [
      { label: "One part short, counted by samples", set: { cut: "ragged", weighting: "samples" } },
      { label: "The same, counted alike: wrong", set: { cut: "ragged", weighting: "means" } },
      { label: "Batch norm, each its own: replicas drift", set: { norm: "own", cut: "even", weighting: "samples" } },
    ],
  },
  {
    title: "Why a ring, and why a tree",
    text: [
      "If everyone sends everything to everyone, a worker sends (N−1) times its gradient. Around a <em>ring</em>, in 2(N−1) steps of one chunk each, it sends 2(N−1)/N times: hardly more for any N.",
      "But float32 sums depend on the order, and a ring's order depends on N. Added along one fixed <em>tree</em> over 16 shards of the batch, the result has the same bits on any number of workers. It moves the bytes of a ring.",
    ],
    settings: { workers: 4, reduction: "ring" },
    steps: 12,
    look: "bits",
    tries: [
      { label: "Added along the tree: same bits", set: { reduction: "tree" } },
      { label: "Back to the ring: bits depend on N", set: { reduction: "ring" } },
      { label: "Naive, eight workers: count the bytes", set: { reduction: "naive", workers: 8 } },
      { label: "Parameter server: one sends for all", set: { reduction: "server", workers: 8 } },
    ],
  },
  {
    title: "Buckets and overlap",
    text: [
      "Gradients come in the backward pass, the last layer's first. They are gathered in <em>buckets</em>, and a full bucket leaves at once, so that most of the communication hides behind computing.",
      "Small buckets pay latency again and again; one large bucket starts when the pass is over. What sticks out behind the backward pass is what you pay. (Simulated: Lockstep's planner, in this page.)",
    ],
    settings: { workers: 8, model: "gpt2", gbits: 100, bucket: 25 },
    look: "timeline",
    tries: [
      { label: "One large bucket", set: { bucket: 1000 } },
      { label: "Buckets of 1 MB, slow messages", set: { bucket: 1, latency: 1000 } },
      { label: "A tenth of the bandwidth", set: { gbits: 10, bucket: 25, latency: 10 } },
      { label: "… and bf16 on the wire", set: { gbits: 10, wire: "bf16" } },
    ],
  },
  {
    title: "Batch size and learning rate",
    text: [
      "More workers usually mean a larger batch: fewer updates for each pass through the data. With the old learning rate the network learns less from the same data.",
      "The usual answer is to scale the rate with the batch, and to <em>warm up</em> to it, since a large rate does harm in the first steps. The grey curve is what you had before: twenty passes through the data each.",
    ],
    settings: { workers: 8, batch: 256, rate: 0.1, reduction: "tree" },
    steps: 40,
    look: "learning",
    tries: [
      { label: "The batch it was tuned for", set: { batch: 32, scaling: "none", warmup: 0 }, to: 320 },
      { label: "Eight times the batch, same rate", set: { batch: 256, scaling: "none", warmup: 0 }, to: 40 },
      { label: "Scaled linearly", set: { batch: 256, scaling: "linear", warmup: 0 }, to: 40 },
      { label: "Scaled, with warm-up", set: { batch: 256, scaling: "linear", warmup: 10 }, to: 40 },
    ],
  },
  {
    title: "Synchronous or not",
    text: [
      "Synchronous: nobody goes on before the sum is there. Asynchronous: each worker sends its gradient to a server and takes the weights it finds. Nobody waits, but gradients are <em>stale</em>: worked out on weights that have changed since.",
      "In between: <em>local steps</em>. Each trains by itself, and now and then they take the mean of their weights: a fraction of the bytes. In both, hashes differ between workers, and speed is not all you compare.",
    ],
    settings: { workers: 4, mode: "async", slow: 3, staleness: 4 },
    steps: 30,
    look: "same",
    tries: [
      { label: "Local steps, a mean every 8", set: { mode: "local", every: 8 } },
      { label: "Asynchronous, far ahead, high rate", set: { mode: "async", staleness: 8, rate: 0.8 } },
      { label: "Synchronous, the same rate", set: { mode: "sync", rate: 0.8 } },
    ],
  },
  {
    title: "Memory, and ZeRO",
    text: [
      "Every worker holds parameters, gradients and optimizer state: with Adam 16 bytes a parameter, N times over. ZeRO splits what need not be everywhere: <em>1</em> the optimizer state, <em>2</em> gradients too, <em>3</em> parameters too.",
      "The result is the same. The price of 3 is that parameters are gathered before they are used.",
    ],
    settings: { workers: 4, model: "llama-13b", gbits: 1600, zero: "0" },
    look: "memory",
    tries: [
      { label: "zero=1", set: { zero: "1" } },
      { label: "zero=2", set: { zero: "2" } },
      { label: "zero=3: now it fits", set: { zero: "3" } },
      { label: "Eight workers: zero=2 would do", set: { zero: "2", workers: 8 } },
    ],
  },
  {
    title: "Stragglers",
    text: [
      "A synchronous step takes as long as the slowest worker. One of eight that is twice as slow makes eight workers as slow as four, and what the others do is wait.",
      "Lockstep names the worker and the cause. Shards may be owned by anybody without a bit changing, so a slow worker can be given fewer.",
    ],
    settings: { workers: 8, slow: 2, reduction: "tree" },
    look: "stage",
    tries: [
      { label: "Give it fewer shards", set: { cut: "ragged" } },
      { label: "Four times as slow", set: { slow: 4, cut: "even" } },
      { label: "Nobody waits", set: { mode: "async", slow: 4 } },
    ],
  },
  {
    title: "Faults",
    text: [
      "A step is a transaction. If a worker dies, the step in flight is void everywhere, and is done again by the others: its shards move. No sample is lost or used twice.",
      "With the tree, the sums are the same whoever owns a shard. So the weights are those of a training in which nothing happened: compare with the worker that trained alone.",
    ],
    settings: { workers: 4, reduction: "tree" },
    steps: 10,
    look: "bits",
    tries: [
      { label: "Kill worker 2", kill: 2 },
      { label: "A replacement joins", join: 2 },
      { label: "The same with a ring", set: { reduction: "ring" } },
    ],
  },
  {
    title: "When not to use it",
    text: [
      "Computing is divided by N; communication is not. So efficiency falls with N, sooner on a slow network or with a small part for each worker. Circles are published measurements.",
      "If the model trains in an hour on one device, stay there. If your batch cannot grow without hurting the result, more workers only cut it thinner. If one layer does not fit on a device, you need tensor or pipeline parallelism as well.",
    ],
    settings: { workers: 16, model: "gpt2", gbits: 25 },
    look: "efficiency",
    tries: [
      { label: "A network sixteen times as fast", set: { gbits: 400 } },
      { label: "Accumulate 8 passes", set: { accumulation: 8 } },
      { label: "int8 on the wire", set: { wire: "int8" } },
    ],
  },
];
