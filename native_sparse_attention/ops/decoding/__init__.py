"""One step of decoding: new tokens into the cache, and what they attend to."""
