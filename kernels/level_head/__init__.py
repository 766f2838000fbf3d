"""From the logits of a SID level to the beams of the next: scores of legal candidates, top-k, the beams' new places."""
