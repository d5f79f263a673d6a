"""The indexer of DeepSeek's sparse attention (DeepSeek-V3.2, GLM-5), and patches on LMDeploy's classes that use it."""
