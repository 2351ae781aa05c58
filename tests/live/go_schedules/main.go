// Sends messages with properties and delivery times by Pulsar's Go client, for schedules_campaign.py.
//
// A line of the input is a message in JSON; a line of the output is what the broker confirmed.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"sync"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

type message struct {
	Partition   int               `json:"partition"`
	Value       string            `json:"value"`
	Properties  map[string]string `json:"properties"`
	DeliverAtMs int64             `json:"deliver_at_ms"`
}

type confirmed struct {
	Value      string `json:"value"`
	LedgerID   int64  `json:"ledger_id"`
	EntryID    int64  `json:"entry_id"`
	BatchIndex int32  `json:"batch_index"`
}

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: schedules SERVICE_URL TOPIC")
	}
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: os.Args[1]})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	producers := map[int]pulsar.Producer{}
	output, outputLock := json.NewEncoder(os.Stdout), sync.Mutex{}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var sent message
		if err := json.Unmarshal(lines.Bytes(), &sent); err != nil {
			log.Fatal(err)
		}
		producer, exists := producers[sent.Partition]
		if !exists {
			topic := fmt.Sprintf("%s-partition-%d", os.Args[2], sent.Partition)
			// A broker that was killed can take minutes until its topics can be written again.
			options := pulsar.ProducerOptions{Topic: topic, SendTimeout: -1}
			if producer, err = client.CreateProducer(options); err != nil {
				log.Fatal(err)
			}
			producers[sent.Partition] = producer
		}
		content := pulsar.ProducerMessage{Payload: []byte(sent.Value), Properties: sent.Properties}
		if sent.DeliverAtMs != 0 {
			content.DeliverAt = time.UnixMilli(sent.DeliverAtMs)
		}
		confirm := func(id pulsar.MessageID, stored *pulsar.ProducerMessage, err error) {
			if err != nil {
				log.Fatal(err)
			}
			outputLock.Lock()
			defer outputLock.Unlock()
			if err := output.Encode(confirmed{string(stored.Payload), id.LedgerID(), id.EntryID(), id.BatchIdx()}); err != nil {
				log.Fatal(err)
			}
		}
		producer.SendAsync(context.Background(), &content, confirm)
	}
	if err := lines.Err(); err != nil {
		log.Fatal(err)
	}
	for _, producer := range producers {
		if err := producer.Flush(); err != nil {
			log.Fatal(err)
		}
		producer.Close()
	}
}
