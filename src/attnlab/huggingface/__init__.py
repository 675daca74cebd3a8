"""Record, adapt, load and fine-tune Hugging Face models.

Importing this package tells transformers about attnlab: attn_implementation="attnlab-sigmoid" and its like work, and
from_pretrained loads adapted models with their mechanisms. transformers itself is imported when something needs it.
"""

from attnlab.huggingface.registration import register

register()
