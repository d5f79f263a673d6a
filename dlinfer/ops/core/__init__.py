"""What every op needs: its spec, its registration with torch, argument checks, samples, the fallback policy."""
