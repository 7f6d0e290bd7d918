"""From a trained SAE to a core: attribution, selection, lineage, controls."""
