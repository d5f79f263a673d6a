"""The machinery of every op: spec, registration with torch, argument checks, samples, fallback policy."""
