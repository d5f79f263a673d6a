"""DeepSeek's sparse attention (DeepSeek-V3.2, GLM-5): the indexer, latent attention to what it chooses, and what
LMDeploy's classes of these models get put right."""
