"""The common code of all ops: definition, registration with torch, argument checks, samples, fallback policy."""
