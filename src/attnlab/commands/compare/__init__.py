"""`attnlab compare`: attentions trained under equal conditions; quality, cost and what is inside, side by side."""
