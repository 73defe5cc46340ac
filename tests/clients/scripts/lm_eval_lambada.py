"""lm-eval's local-completions on LAMBADA: URL MODEL TOKENIZER FILE ITEMS ACCURACY WORK.

It prints SAME if its accuracy is within 0.1 points of ACCURACY, which `tridecode evaluate-lambada` found.
"""

import json
import subprocess
import sys
from pathlib import Path

url, model, tokenizer, file, items, wanted, work = sys.argv[1:]
TASK = """task: lambada_file
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: '{{{{text.strip("\\n").split(" ")[:-1] | join(" ")}}}}'
doc_to_target: '{{{{" " + text.strip("\\n").split(" ")[-1]}}}}'
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
folder = Path(work) / "tasks"
folder.mkdir(exist_ok=True)
(folder / "lambada_file.yaml").write_text(TASK.format(file=json.dumps(file)))
arguments = f"model={model},base_url={url}/completions,tokenizer={tokenizer},num_concurrent=2,max_retries=1"
command = [str(Path(sys.executable).parent / "lm_eval"), "--model", "local-completions"]
command += ["--model_args", arguments, "--tasks", "lambada_file", "--include_path", str(folder)]
command += ["--limit", items, "--output_path", str(Path(work) / "results.json")]
subprocess.run(command, check=True)
newest = max(Path(work).glob("results*.json"), key=lambda path: path.stat().st_mtime)
found = 100 * json.loads(newest.read_text())["results"]["lambada_file"]["acc,none"]
word = "SAME" if abs(found - float(wanted)) <= 0.1 else "DIFFERENT"
print(f"{word} {found:.2f} % by lm-eval, {float(wanted):.2f} % by evaluate-lambada")
